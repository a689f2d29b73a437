"""Messages of `gputrain predict` and `evaluate`."""

from __future__ import annotations

import pytest

from tui.cli.trained import print_warning


def test_print_warning_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_warning("reserved by run x\x1b]0;pwned\x07 (user eve)")
    assert capsys.readouterr().err == "warning: reserved by run x\\x1b]0;pwned\\x07 (user eve)\n"
