"""The owner of a run keeps its place in the queue, its heartbeat and its reservation up to date."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine.config.schema import Config
from engine.gpus import reservation
from engine.launch.lifecycle import OwnedRun
from engine.launch.preflight import RunRequest
from engine.queue.state import QueueStage, is_interrupted, read_queue_state
from engine.runs import ownership
from engine.runs.events import RankFailed
from engine.runs.folder import list_runs
from engine.training.job import RunResult


def test_owner_takes_run_out_of_queue_that_fails_before_it_starts(tmp_path: Path) -> None:
    owned = OwnedRun(RunRequest(Config(), tmp_path, "a"), lambda _: None)
    owned.enter_queue().leave([])
    owned.end(RunResult("failed", RankFailed(rank=0, device="cpu", cause="it was killed by SIGKILL")))
    owned.release()
    [folder] = list_runs(tmp_path)
    state = read_queue_state(folder)
    assert state is not None
    assert state.stage is QueueStage.ENDED
    assert not is_interrupted(folder)


def test_owner_renews_heartbeat_and_keeps_reservation_from_tmp_cleaners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    monkeypatch.setattr(ownership, "HEARTBEAT_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(reservation, "TOUCH_INTERVAL_SECONDS", 0.0)
    owned = OwnedRun(RunRequest(Config(), tmp_path / "runs", "a"), lambda _: None)
    owned.enter_queue()
    owned.allocation.reservation.enqueue("free:1", ["GPU-0"], "a")
    [folder] = list_runs(tmp_path / "runs")
    folder.owner.write_text(json.dumps(json.loads(folder.owner.read_text()) | {"heartbeat": 0}))
    reserved = [*tmp_path.glob("gputrain-*/*")]
    for path in reserved:
        os.utime(path, (0, 0))
    owned.keep_alive()
    assert json.loads(folder.owner.read_text())["heartbeat"] > 0
    assert sorted(path.suffix for path in reserved) == [".json", ".lock"]
    assert all(path.stat().st_mtime > 0 for path in reserved)
    owned.release()
