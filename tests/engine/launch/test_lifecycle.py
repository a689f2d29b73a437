"""The owner of a run keeps its place in the queue up to date."""

from __future__ import annotations

from pathlib import Path

from engine.config.schema import Config
from engine.launch.lifecycle import OwnedRun
from engine.launch.preflight import RunRequest
from engine.queue.state import QueueStage, is_interrupted, read_queue_state
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
