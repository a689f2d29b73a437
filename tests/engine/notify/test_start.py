"""The watcher of a run is a process of its own, which its owner starts again if it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.notify.start import start_watcher
from engine.runs import sinks
from engine.runs.claimed_run import claim_run
from support.gputrain_command import wait_for
from support.messages import has_problem


def test_killed_watcher_is_reported_once_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("NTFY", "json://127.0.0.1:9")
    config = resolve_config("digits", ["notify.urls=env:NTFY"]).config
    claimed = claim_run(tmp_path, "a", "x", resume=False)
    notifier, warnings = start_watcher(claimed.folder, config)
    try:
        assert warnings == []
        killed = notifier.process
        assert killed is not None
        assert notifier.keep_alive(claimed.folder, config) == []
        killed.kill()
        killed.wait()
        assert has_problem(notifier.keep_alive(claimed.folder, config), "switched-off", "", "SIGKILL", "0 s")
        [recovered] = notifier.keep_alive(claimed.folder, config)
        assert "SIGKILL" not in recovered.reason
        assert notifier.process is not killed
        name = b"engine.notify.watcher"
        assert notifier.process is not None
        command = Path(f"/proc/{notifier.process.pid}/cmdline")
        wait_for(lambda: name in command.read_bytes(), "the new watcher")
        assert notifier.keep_alive(claimed.folder, config) == []
    finally:
        if notifier.process is not None:
            notifier.process.kill()
            notifier.process.wait()
        claimed.ownership.release()
    assert not os.path.lexists(claimed.folder.path / "notify.log")
