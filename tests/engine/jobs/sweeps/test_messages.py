"""A sweep sends one message about its end, and its trials none about theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.exit_codes import ExitCode
from engine.config.loader import resolve_config
from engine.jobs.sweeps.controller import send_end
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.trial import trial_override
from support.servers.notify_server import gone_server, notify_server


@pytest.fixture(autouse=True)
def no_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


def test_trials_report_only_what_the_sweep_does_not() -> None:
    assert trial_override(resolve_config(None).config) == "notify.when=[crashed,stalled,slowed]"
    quiet = resolve_config(None, ["notify.when=[finished]"]).config
    assert trial_override(quiet) == "notify.when=[]"
    assert resolve_config(None, [trial_override(quiet)]).config.notify.when == ()


def test_sweep_sends_message_about_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lines = SweepFolder(tmp_path / "night"), ["2 trials: 2 complete", "best: trial 1, val_accuracy 0.9"]
    with notify_server() as server:
        monkeypatch.setenv("NTFY", server.url)
        config = resolve_config(None, ["notify.urls=env:NTFY"]).config
        assert send_end(folder, config, ExitCode.FINISHED, lines) == []
        # Not among the default occasions: the user requested it.
        assert send_end(folder, config, ExitCode.STOPPED, lines) == []
    assert [title.partition(" on ")[0] for title in server.titles] == ["sweep night finished"]
    assert server.received[0]["message"] == "\n".join(lines)


def test_sweep_tells_why_no_message_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NTFY", gone_server().url)
    config = resolve_config(None, ["notify.urls=env:NTFY"]).config
    (problem,) = send_end(SweepFolder(tmp_path / "night"), config, ExitCode.FAILED, ["1 trial: 1 failed"])
    assert problem.code == "connection-failed" and "env:NTFY (JSON at 127.0.0.1): " in problem.reason
