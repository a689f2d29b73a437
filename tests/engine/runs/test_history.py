"""Step, epoch and phase of a run, derived from its events."""

from __future__ import annotations

import pytest

from engine.runs.events import CheckpointSaved, Event, PhaseChanged, RunPaused, WarningEvent
from engine.runs.history import history_from_events
from factories import make_epoch, make_run_resumed, make_run_started, make_step

STARTED = make_run_started()  # 10 steps per epoch


def phase(name: str, step: int, epoch: int) -> PhaseChanged:
    return PhaseChanged(phase=name, step=step, epoch=epoch)


def test_history_takes_step_of_pause_between_step_events() -> None:
    history = history_from_events([STARTED, make_step(10), make_epoch(1), RunPaused(step=17, epoch=2)])
    assert (history.steps_done, history.current_epoch) == (17, 2)


def test_history_ignores_step_event_that_is_reported_late() -> None:
    history = history_from_events([STARTED, phase("validating", 10, 1), make_step(8)])
    assert (history.steps_done, history.current_epoch) == (10, 1)


def test_history_goes_back_to_step_of_resumed_checkpoint() -> None:
    history = history_from_events([STARTED, make_step(19, epoch=2), make_run_resumed(12, 9.0)])
    assert (history.steps_done, history.current_epoch, history.phase) == (12, 2, "")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([make_step(4)], ""),
        ([phase("training", 0, 1), make_step(4)], "training"),
        ([phase("validating", 10, 1)], "validating"),
        ([phase("training", 0, 1), phase("saving", 4, 1)], "saving"),
        (
            [phase("validating", 10, 1), phase("saving", 10, 1), CheckpointSaved(path="", step=10, epoch=1)],
            "validating",
        ),
        ([phase("training", 0, 1), phase("saving", 4, 1), WarningEvent(message="disk full")], "training"),
    ],
)
def test_history_phase_follows_events(events: list[Event], expected: str) -> None:
    assert history_from_events([STARTED, *events]).phase == expected
