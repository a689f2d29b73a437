"""The flags of config keys: the same for every command that trains a config."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.config.schema import Config, as_stored
from engine.config.yaml_io import to_yaml
from support.messages import says
from support.runs.factories import make_run_folder
from tui.cli.main import app


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore the signal handlers that a command which trains leaves to the process that it ends."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("change", "code", "location"),
    [
        (["--lr", "-1"], "out-of-range", "optim.lr"),
        (["--name", "b"], "conflict", "run.name"),
        (["--lr", "0.1", "optim.lr=0.2"], "conflict", "optim.lr"),
    ],
)
def test_resume_refuses_change(tmp_path: Path, change: list[str], code: str, location: str) -> None:
    run = make_run_folder(tmp_path, "a")
    run.config.write_text(to_yaml(as_stored(Config())))
    result = CliRunner().invoke(app, ["resume", "a", "--headless", "--runs-dir", str(tmp_path), *change])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {location}: ") and says(result.stderr, code)
