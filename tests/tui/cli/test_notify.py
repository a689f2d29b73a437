"""`gputrain doctor --send-test-message`: the help explains the set-up, and a URL as config is not repeated."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from support.servers.notify_server import PASSWORD
from tui.cli.main import app


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--send-test-message", f"slack://{PASSWORD}"],
        ["config", f"notify.urls=slack://{PASSWORD}"],
    ],
)
def test_url_on_command_line_is_refused_without_showing_it(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert PASSWORD not in result.output
    assert "env:NAME" in result.output
