"""Curve data from journal events, and the visible part of it."""

from __future__ import annotations

import math

import numpy as np

from engine.runs.curves import CurveData
from engine.runs.events import Event, RunContinued, RunPaused, StepEvent
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step
from tui.charts.view import ChartView


def steps(last: int, losses: list[float | None], time: float, lr: float = 0.1) -> StepEvent:
    return StepEvent(
        time=time,
        step=last,
        epoch=1,
        losses=losses,  # type: ignore[arg-type]
        lr=lr,
        images_per_second=1.0,
        data_wait=0.0,
    )


def curves(*events: Event) -> CurveData:
    data = CurveData()
    for event in events:
        data.add(event)
    return data


def test_curves_count_non_finite_losses_and_leave_gap() -> None:
    data = curves(make_run_started(), steps(3, [1.0, None, None], 10.0))
    assert data.nonfinite_count == 2
    assert np.array_equal(data.train_loss("step").y, [1, math.nan, math.nan], equal_nan=True)


def test_curves_drop_steps_after_resumed_checkpoint() -> None:
    first = [make_run_started(), steps(10, [1.0] * 10, 10.0), make_epoch(1, 0.5), steps(14, [9.0] * 4, 14.0)]
    data = curves(*first, make_run_resumed(10, 100.0), steps(12, [2.0, 2.0], 102.0))
    assert data.train_loss("step").y.tolist() == [1.0] * 10 + [2.0] * 2
    assert data.step_metric("lr", "step").x.tolist() == [10, 12]
    assert data.epoch_metric("val_accuracy", "step").y.tolist() == [0.5]


def test_curves_show_ema_accuracy_as_separate_series() -> None:
    plain = curves(make_run_started(), make_epoch(1, 0.5))
    assert [curve.label for curve in ChartView().curves_for(plain, "accuracy")] == ["train", "val"]
    averaged = curves(make_run_started(), replace(make_epoch(1, 0.5), ema_val_accuracy=0.75))
    *_, ema = ChartView().curves_for(averaged, "accuracy")
    assert (ema.label, ema.series.y.tolist()) == ("ema", [0.75])
    assert averaged.nonfinite_count == 0


def test_curves_support_step_epoch_and_hour_axes() -> None:
    events = [
        make_run_started(0.0),
        steps(10, [1.0] * 10, 3600.0),
        make_run_resumed(10, 90_000.0),
        steps(20, [1.0] * 10, 93_600.0),
    ]
    data = curves(*events)
    assert data.step_metric("lr", "step").x.tolist() == [10, 20]
    assert data.step_metric("lr", "epoch").x.tolist() == [1, 2]
    assert data.step_metric("lr", "hours").x.tolist() == [1, 2]


def test_curves_leave_pauses_out_of_the_training_time() -> None:
    events = [make_step(10, time=3600.0), RunPaused(time=4000.0, step=10, epoch=1)]
    events += [RunContinued(time=11_200.0, step=10, epoch=1), make_step(20, 2, 14_400.0)]
    assert curves(make_run_started(), *events).step_metric("lr", "hours").x.tolist() == [1, 2]


def visible_range(view: ChartView, data: CurveData) -> tuple[float, float]:
    low, high = view.x_limits(data)
    return round(low, 6), round(high, 6)


def test_view_zoom_follows_latest_point() -> None:
    data = curves(make_run_started(), steps(40, [1.0] * 40, 10.0))
    assert visible_range(ChartView(), data) == (0, 4)
    zoomed = ChartView().zoom(data, 0.5)
    assert visible_range(zoomed, data) == (2, 4)
    data.add_events([steps(80, [1.0] * 40, 20.0)])
    assert visible_range(zoomed, data) == (6, 8)
    assert visible_range(zoomed.pan(data, -0.5), data) == (5, 7)
    assert visible_range(zoomed.pan(data, -9.0), data) == (0, 2)
    assert visible_range(zoomed.pan(data, -9.0).zoom(data, 2.0), data) == (0, 4)
    assert visible_range(zoomed.reset_zoom(), data) == (0, 8)


def test_view_cursor_stays_in_window_and_reads_nearest_point() -> None:
    data, view = curves(make_run_started(), steps(40, [float(n) for n in range(40)], 10.0)), ChartView("step")
    assert view.move_cursor(data, 1).cursor == 40
    moved = view.move_cursor(data, 1).move_cursor(data, -50)
    assert moved.cursor == 20
    assert moved.curves_for(data, "loss")[0].series.value_at(20) == 19
    assert moved.move_cursor(data, -500).cursor == 0


def test_curves_star_the_best_epoch() -> None:
    data = curves(make_run_started(), make_epoch(1, 0.5), make_epoch(2, 0.75), make_epoch(3, 0.7))
    view = ChartView()
    assert view.best_note(data, "accuracy") == "★ best 0.7500 @2"
    assert [curve.star_x for curve in view.curves_for(data, "accuracy")] == [None, 2.0]


def test_own_metrics_between_0_and_1_are_curves_of_the_accuracy_chart() -> None:
    data = CurveData()
    values = [{}, {"f1": 0.25, "entropy": 2.0}, {"f1": math.nan, "entropy": 1.0}, {"f1": 0.75}]
    epochs = [replace(make_epoch(number), metrics=metrics) for number, metrics in enumerate(values, 1)]
    data.add_events([make_run_started(), *epochs])
    [curve] = ChartView().curves_for(data, "accuracy")[2:]
    assert curve.label == "f1" and curve.series.x.tolist() == [1.0, 2.0, 3.0, 4.0]
    np.testing.assert_array_equal(curve.series.y, [math.nan, 0.25, math.nan, 0.75])
    data.add_events([make_run_resumed(20, 5.0), epochs[2]])
    assert data.own_metrics("step")["f1"].x.tolist() == [10.0, 20.0, 30.0]
    assert [curve.label for curve in ChartView().curves_for(data, "loss")] == ["train", "val"]
