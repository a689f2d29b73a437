"""Progress of the ranks for the terminal."""

from __future__ import annotations

from engine.distributed.channel import PipeChannel
from engine.distributed.watchdog import Heartbeats, Phase
from engine.launch.ranks import ProgressReporter
from engine.runs.event_lines import TrainingProgress
from engine.runs.events import Event
from engine.training.job import Outcome, RunResult
from support.runs.supervised import Supervised, wait_for_stop


def test_progress_reporter_emits_each_step_that_all_ranks_completed_once() -> None:
    events: list[Event] = []
    heartbeats, reporter = Heartbeats(2), ProgressReporter(events.append, min_interval_s=0.0)
    for first, second in ((0, 0), (3, 0), (3, 2), (3, 2), (3, 3)):
        heartbeats.write(0, first, 0, Phase.FORWARD)
        heartbeats.write(1, second, 0, Phase.BACKWARD)
        reporter.poll(heartbeats)
    heartbeats.close()
    assert [event.step for event in events if isinstance(event, TrainingProgress)] == [2, 3]


def test_supervisor_shows_progress_of_ranks() -> None:
    def train(channel: PipeChannel) -> Outcome:
        channel.enter_phase(3, Phase.FORWARD)
        return wait_for_stop(channel)

    run = Supervised(train, train)

    def stop_once_shown() -> None:
        if any(isinstance(event, TrainingProgress) for event in run.events):
            run.signals.request_stop("SIGTERM")

    assert run.run(stop_once_shown) == RunResult("stopped")
    assert {event.step for event in run.events if isinstance(event, TrainingProgress)} == {3}
