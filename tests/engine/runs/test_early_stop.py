"""`run.early_stop`: which epochs count as a gain, when training ends, and what a checkpoint restores."""

from __future__ import annotations

import pytest

from engine.config.run_sections import RunConfig
from engine.launch.ranks import describe_early_stop, is_complete
from engine.runs.early_stop import EarlyStop, has_stopped_early
from engine.runs.history import history_from_events
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started


@pytest.mark.parametrize(
    ("patience", "min_delta", "accuracies", "epochs"),
    [
        (0, 0.0, [0.5] * 20, None),
        (2, 0.0, [0.1, 0.2, 0.2, 0.2, 0.9], 4),
        (2, 0.0, [0.1, 0.2, 0.1, 0.3, 0.2, 0.3], 6),
        # Gains of less than 0.05 each add up to one that counts.
        (2, 0.05, [0.1, 0.13, 0.16, 0.17, 0.18, 0.19], 5),
        (1, 0.0, [-1.0, -1.0], 2),
    ],
)
def test_early_stop_expires_after_patience(
    patience: int, min_delta: float, accuracies: list[float], epochs: int | None
) -> None:
    run = RunConfig(early_stop=patience, early_stop_min_delta=min_delta)
    events = [make_epoch(number, accuracy) for number, accuracy in enumerate(accuracies, 1)]
    assert next((n for n in range(len(events) + 1) if has_stopped_early(run, events[:n])), None) == epochs


def test_early_stop_continues_from_checkpoint() -> None:
    run = RunConfig(early_stop=3)
    whole = EarlyStop(run)
    for accuracy in (0.1, 0.5, 0.4):
        whole.step(accuracy)
    for saved in (whole, EarlyStop(run)):
        resumed = EarlyStop(run)
        resumed.load_state_dict(saved.state_dict())
        assert resumed.state_dict() == saved.state_dict()


def test_lifecycle_reports_early_stop_and_has_nothing_left_until_patience_grows() -> None:
    started = replace(make_run_started(), epochs=9)
    history = history_from_events([started, make_epoch(1, 0.5), make_epoch(2, 0.4), make_epoch(3, 0.5)])
    assert describe_early_stop(history) == "stopped early after 3 of 9 epochs (run.early_stop)"
    runs = (RunConfig(epochs=9, early_stop=2), RunConfig(epochs=20, early_stop=2), RunConfig(epochs=9, early_stop=3))
    assert [is_complete(run, history) for run in (*runs, RunConfig(epochs=9), RunConfig(epochs=3))] == [
        *(True, True, False),
        *(False, True),
    ]
    assert describe_early_stop(history_from_events([replace(started, epochs=3), make_epoch(3)])) == ""
