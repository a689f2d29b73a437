"""Progress of the ranks for the terminal."""

from __future__ import annotations

from engine.distributed.watchdog import Heartbeats, Phase
from engine.launch.progress import ProgressReporter
from engine.runs.events import Event
from engine.runs.terminal_events import TrainingProgress


def test_progress_reporter_emits_each_step_that_all_ranks_completed_once() -> None:
    events: list[Event] = []
    heartbeats, reporter = Heartbeats(2), ProgressReporter(events.append, min_interval_s=0.0)
    for first, second in ((0, 0), (3, 0), (3, 2), (3, 2), (3, 3)):
        heartbeats.write(0, first, 0, Phase.FORWARD)
        heartbeats.write(1, second, 0, Phase.BACKWARD)
        reporter.poll(heartbeats)
    heartbeats.close()
    assert [event.step for event in events if isinstance(event, TrainingProgress)] == [2, 3]
