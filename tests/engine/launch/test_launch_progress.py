"""Progress of the ranks for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config.schema import Config
from engine.distributed.watchdog import Heartbeats, Phase
from engine.launch import launcher
from engine.launch.lifecycle import TrainingRun
from engine.launch.progress import ProgressReporter
from engine.launch.request import RunRequest
from engine.runs.event_lines import TrainingProgress
from engine.runs.events import Event
from engine.training.job import Job, RunResult
from engine.utils.process import SignalHandler
from support.runs.supervised import PLAN


def test_progress_reporter_emits_each_step_that_all_ranks_completed_once() -> None:
    events: list[Event] = []
    heartbeats, reporter = Heartbeats(2), ProgressReporter(events.append, min_interval_s=0.0)
    for first, second in ((0, 0), (3, 0), (3, 2), (3, 2), (3, 3)):
        heartbeats.write(0, first, 0, Phase.FORWARD)
        heartbeats.write(1, second, 0, Phase.BACKWARD)
        reporter.poll(heartbeats)
    heartbeats.close()
    assert [event.step for event in events if isinstance(event, TrainingProgress)] == [2, 3]


def test_launcher_shows_progress_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(
        run: TrainingRun, job: Job, signals: SignalHandler, on_tick: Callable[[Heartbeats], None], *_: object
    ) -> RunResult:
        heartbeats = Heartbeats(1)
        heartbeats.write(0, 3, 0, Phase.FORWARD)
        on_tick(heartbeats)
        heartbeats.close()
        return RunResult("finished")

    monkeypatch.setattr(launcher, "_run_ranks", run_ranks)
    events: list[Event] = []
    run = TrainingRun(RunRequest(Config(), tmp_path, "a"), events.append)
    launcher._train(run, Job(Config(), PLAN, None, resumed=False, source=None), SignalHandler(), None)
    assert [event.step for event in events if isinstance(event, TrainingProgress)] == [3]
