"""Step, epoch and phase of a run, derived from its events."""

from __future__ import annotations

import pytest

from engine.runs.event_lines import event_line
from engine.runs.events import (
    CheckpointSaved,
    Event,
    FinalTest,
    PhaseChanged,
    RunContinued,
    RunFinished,
    RunPaused,
)
from engine.runs.history import history_from_events
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step

STARTED = make_run_started()  # 10 steps per epoch


def phase(name: str, step: int, epoch: int) -> PhaseChanged:
    return PhaseChanged(phase=name, step=step, epoch=epoch)


def test_history_ignores_step_event_that_is_reported_late() -> None:
    history = history_from_events([STARTED, phase("validating", 10, 1), make_step(8)])
    assert (history.steps_done, history.current_epoch) == (10, 1)


def test_history_goes_back_to_step_of_resumed_checkpoint() -> None:
    history = history_from_events([STARTED, make_step(19, epoch=2), make_run_resumed(12, 9.0)])
    assert (history.steps_done, history.current_epoch, history.phase) == (12, 2, "")


def test_history_duration_leaves_out_clock_that_was_set_back() -> None:
    events = [
        make_run_started(5000.0),
        make_epoch(1, time=5010.0),
        make_epoch(2, time=1410.0),
        make_epoch(3, time=1420.0),
    ]
    history = history_from_events(events)
    assert history.total_seconds == 20.0
    history.add(RunFinished(time=1425.0, state="finished"))
    # The next session began an hour before the end of the first, by the clock.
    for event in (make_run_resumed(30, time=200.0), make_epoch(4, time=207.0)):
        history.add(event)
    assert history.total_seconds == 25.0 + 7.0


def test_history_has_test_of_the_latest_session() -> None:
    tested = FinalTest(step=20, epoch=1, images=6, skipped_images=0, loss=0.25, accuracy=0.75, top5=1.0, metrics={})
    events = [STARTED, make_epoch(1), make_epoch(2), tested]
    record = history_from_events(events).record()
    assert (record.values.get("test_loss"), record.values.get("test_accuracy")) == (0.25, 0.75)
    line = event_line(tested)
    assert line is not None and "loss 0.2500 acc 0.7500" in line and "epoch 1" in line and "6 images" in line
    resumed = history_from_events([*events, make_run_resumed(20, time=9.0)]).record()
    assert {"test_loss", "test_accuracy"}.isdisjoint(resumed.values)


def test_history_duration_leaves_out_pauses() -> None:
    history = history_from_events([make_run_started(100.0), RunPaused(time=110.0, step=5, epoch=1)])
    for time in (200.0, 300.0):
        # A checkpoint that is requested during the pause is no training either.
        history.add(CheckpointSaved(time=time, path="last.pt", step=5, epoch=1))
        assert history.total_seconds == 10.0
    history.add(RunContinued(time=400.0, step=5, epoch=1))
    history.add(make_epoch(1, time=420.0))
    assert history.total_seconds == history.record().seconds == 30.0


@pytest.mark.parametrize("end", [RunFinished(time=900.0, state="stopped"), make_run_resumed(5, 900.0)])
def test_history_duration_of_session_that_ends_in_a_pause_ends_with_it(end: Event) -> None:
    """It is stopped, or it crashes and is resumed."""
    saved = CheckpointSaved(time=500.0, path="last.pt", step=5, epoch=1)
    events = [make_run_started(100.0), RunPaused(time=110.0, step=5, epoch=1), saved, end]
    assert history_from_events(events).seconds == 10.0
