"""The journal of a training as points: steps and epochs, x axes, sessions, pauses, and the best epoch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from engine.runs.curves import CurveReader, Curves, XAxis
from engine.runs.events import Event, RunContinued, RunPaused, StepEvent
from engine.runs.journal import to_line
from engine.runs.journal_source import EPOCH_LOSS, JournalPoints, journal_run
from support.replace import replace
from support.runs.curves import curves_of
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step
from support.runs.factories import append_events, make_run_folder


def steps(last: int, losses: list[float | None], time: float) -> StepEvent:
    return replace(make_step(last, time=time), losses=losses)


def positions(curves: Curves, name: str, axis: XAxis) -> list[float]:
    return curves.over(name, axis).points.x.tolist()


def test_losses_are_points_of_each_step_and_leave_a_gap_where_they_are_not_finite() -> None:
    curves = curves_of(make_run_started(), steps(3, [1.0, None, None], 10.0))
    points = curves.over("train_loss", "step").points
    assert points.x.tolist() == [1, 2, 3]
    assert np.array_equal(points.y, [1, math.nan, math.nan], equal_nan=True)
    assert curves.count_not_finite(["train_loss"]) == 2


@pytest.mark.parametrize("parts", [1, 6])
def test_resumed_run_drops_the_steps_after_its_checkpoint(parts: int) -> None:
    events: list[Event] = [make_run_started(), steps(10, [1.0] * 10, 10.0), make_epoch(1, 0.5)]
    events += [steps(14, [9.0] * 4, 14.0), make_run_resumed(10, 100.0), steps(12, [2.0, 2.0], 102.0)]
    curves, source = Curves(), JournalPoints()
    for part in range(parts):
        curves.add([source.read(events[len(events) * part // parts : len(events) * (part + 1) // parts])])
    assert curves.over("train_loss", "step").points.y.tolist() == [1.0] * 10 + [2.0] * 2
    assert positions(curves, "lr", "step") == [10, 12]
    assert curves.over("val_accuracy", "step").points.y.tolist() == [0.5]


def test_axes_are_steps_epochs_and_hours_without_the_gap_between_sessions() -> None:
    events = [make_run_started(0.0), steps(10, [1.0] * 10, 3600.0), make_run_resumed(10, 90_000.0)]
    curves = curves_of(*events, steps(20, [1.0] * 10, 93_600.0))
    assert curves.axes == ("epoch", "step", "hours")
    assert positions(curves, "lr", "step") == [10, 20]
    assert positions(curves, "lr", "epoch") == [1, 2]
    assert positions(curves, "lr", "hours") == [1, 2]
    assert positions(curves, "train_loss", "hours") == pytest.approx(np.arange(1, 21) / 10)
    assert curves.last_x("hours") == 2


def test_hours_leave_out_pauses() -> None:
    events = [make_step(10, time=3600.0), RunPaused(time=4000.0, step=10, epoch=1)]
    events += [RunContinued(time=11_200.0, step=10, epoch=1), make_step(20, 2, 14_400.0)]
    assert positions(curves_of(make_run_started(), *events), "lr", "hours") == [1, 2]


def test_epochs_have_all_their_metrics_and_own_ones_once_they_are_known() -> None:
    values: list[dict[str, float | None]] = [{}, {"f1": 0.25}, {"f1": None}, {"f1": 0.75}]
    epochs = [replace(make_epoch(number), metrics=metrics) for number, metrics in enumerate(values, 1)]
    curves = curves_of(make_run_started(), *epochs)
    own = curves.over("metrics.f1", "epoch").points
    assert own.x.tolist() == [2, 3, 4]
    np.testing.assert_array_equal(own.y, [0.25, math.nan, 0.75])
    assert len(curves.over(EPOCH_LOSS, "epoch").points.y) == 4
    assert not curves.has("ema_val_accuracy") and not curves.has("train_loss")


def test_best_values_are_those_of_the_ema_weights() -> None:
    epochs = [make_epoch(1, 0.75), replace(make_epoch(2, 0.5), ema_val_accuracy=0.875, ema_val_loss=0.25)]
    curves = curves_of(make_run_started(), *epochs)
    assert curves.over("best_val_accuracy", "step").points.y.tolist() == [0.75, 0.875]
    assert curves.over("best_val_loss", "step").points.y.tolist() == [1.1, 0.25]
    assert curves.over("val_loss", "step").points.y.tolist() == [1.1, 0.55]


def test_epoch_ends_at_its_results_on_each_axis() -> None:
    curves = curves_of(make_run_started(0.0), make_step(20, 2, 7200.0), make_epoch(1), make_epoch(2))
    assert [curves.end_of_epoch(2, axis) for axis in curves.axes] == [2, 20, 2]
    assert curves.end_of_epoch(3, "step") is None and curves.end_of_epoch(None, "step") is None


def test_reader_follows_a_journal_and_starts_over_when_it_is_replaced(tmp_path: Path) -> None:
    folder, events = make_run_folder(tmp_path, "a", make_run_started(), make_epoch(1)), list[Event]()
    reader = CurveReader(journal_run(folder, on_event=events.append))
    assert reader.read() and [event.type for event in events] == ["run_started", "epoch"]
    append_events(folder, make_epoch(2))
    assert reader.read() and reader.curves.extremes("val_loss").count == 2
    folder.journal.write_text(to_line(make_run_started()) + "\n")
    assert reader.read() and reader.curves.names == []


def test_all_columns_keep_each_point_of_a_long_run() -> None:
    curves = Curves(max_columns=1 << 26)
    losses = [float(step % 7) for step in range(100_000)]
    curves.add([JournalPoints().read([make_run_started(), steps(100_000, losses, 10.0)])])
    assert curves.over("train_loss", "step").points.y.tolist() == losses
    assert curves_of(make_run_started(), steps(100_000, losses, 10.0)).block_size("train_loss") > 1
