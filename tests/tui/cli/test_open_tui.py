"""What the terminal shows after the screen has closed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.screen.demo_app import demo_app, demo_runs
from tui.cli.main import screen_app
from tui.cli.open_tui import exit_after_screen
from tui.screens.app import GputrainApp
from tui.screens.demo.server import DEMO_NOTICE, FINISHED_RUN, LIVE_RUN


def messages_after(app: GputrainApp, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        exit_after_screen(app)
    assert exit_info.value.code == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def opened_app(root: Path, demo: str | None = None) -> GputrainApp:
    """An app in which a live and a finished run were opened."""
    from engine.runs.folder import RunFolder

    app = demo_app(root, demo=demo)
    app.opened_runs = [RunFolder(root / LIVE_RUN), RunFolder(root / FINISHED_RUN)]
    return app


def test_exit_after_screen_says_how_to_return_to_live_runs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    [owner] = demo_runs(root)
    monkeypatch.setenv("GPUTRAIN_RUNS", str(root))
    expected = f"{LIVE_RUN} goes on in {root / LIVE_RUN}. To return: gputrain attach "
    assert messages_after(opened_app(root), capsys) == f"{expected}{LIVE_RUN}\n"
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    assert messages_after(opened_app(root), capsys) == f"{expected}{root / LIVE_RUN}\n"
    app = opened_app(root)
    app.called_host = "lab1"
    assert messages_after(app, capsys) == f"{expected}lab1:{root / LIVE_RUN}\n"
    assert messages_after(opened_app(root, DEMO_NOTICE), capsys) == ""
    owner.release()
    assert messages_after(opened_app(root), capsys) == ""


def test_screen_refuses_what_is_no_host() -> None:
    result = CliRunner().invoke(screen_app, ["--hosts", "lab1,-oProxyCommand=x"], prog_name="gputrain-tui")
    assert result.exit_code == 2 and "-oProxyCommand=x" in result.stderr
