"""The visible part of curves, and the curves of the charts of a training."""

from __future__ import annotations

from engine.report.charts import compared_charts, run_charts
from engine.runs.curves import Curves, XAxis
from engine.runs.events import Event, StepEvent
from engine.runs.history import history_from_events
from engine.runs.journal_source import JournalPoints
from engine.runs.run_record import NO_RECORD, RunRecord
from support.replace import replace
from support.runs.curves import curves_of
from support.runs.event_factories import make_epoch, make_run_started, make_step
from tui.charts.plot import Curve
from tui.charts.view import ChartView, best_note, curves_for


def steps(last: int, losses: list[float]) -> StepEvent:
    return replace(make_step(last), losses=losses)


def drawn(data: Curves, chart_id: str, axis: XAxis = "epoch", record: RunRecord = NO_RECORD) -> list[Curve]:
    return curves_for(data, {chart.id: chart for chart in run_charts(data)}[chart_id], axis, record)


def test_ema_accuracy_is_a_curve_of_its_own() -> None:
    plain = curves_of(make_run_started(), make_epoch(1, 0.5))
    assert [curve.label for curve in drawn(plain, "accuracy")] == ["train", "val"]
    events = [make_run_started(), replace(make_epoch(1, 0.5), ema_val_accuracy=0.75, ema_val_loss=0.5)]
    *_, ema = drawn(curves_of(*events), "accuracy", record=history_from_events(events).record())
    assert (ema.label, ema.series.y.tolist(), ema.star_x) == ("ema", [0.75], 1.0)


def visible_range(view: ChartView, data: Curves) -> tuple[float, float]:
    low, high = view.x_limits(data)
    return round(low, 6), round(high, 6)


def test_view_zoom_follows_latest_point() -> None:
    data, source = Curves(), JournalPoints()
    data.add([source.read([make_run_started(), steps(40, [1.0] * 40)])])
    assert visible_range(ChartView(), data) == (0, 4)
    zoomed = ChartView().zoom(data, 0.5)
    assert visible_range(zoomed, data) == (2, 4)
    data.add([source.read([steps(80, [1.0] * 40)])])
    assert visible_range(zoomed, data) == (6, 8)
    assert visible_range(zoomed.pan(data, -0.5), data) == (5, 7)
    assert visible_range(zoomed.pan(data, -9.0), data) == (0, 2)
    assert visible_range(zoomed.pan(data, -9.0).zoom(data, 2.0), data) == (0, 4)
    assert visible_range(zoomed.reset_zoom(), data) == (0, 8)


def test_view_cursor_stays_in_window_and_reads_nearest_point() -> None:
    data, view = curves_of(make_run_started(), steps(40, [float(n) for n in range(40)])), ChartView("step")
    assert view.move_cursor(data, 1).cursor == 40
    moved = view.move_cursor(data, 1).move_cursor(data, -50)
    assert moved.cursor == 20
    assert drawn(data, "loss", "step")[0].series.value_at(20) == 19
    assert moved.move_cursor(data, -500).cursor == 0


def test_curves_star_the_best_epoch() -> None:
    events = [make_run_started(), make_epoch(1, 0.5), make_epoch(2, 0.75), make_epoch(3, 0.7)]
    data, record = curves_of(*events), history_from_events(events).record()
    assert best_note(data, run_charts(data)[1], record) == "★ best 0.7500 @2"
    assert [curve.star_x for curve in drawn(data, "accuracy", record=record)] == [None, 2.0]
    assert [curve.star_x for curve in drawn(data, "loss", record=record)] == [None, 2.0]
    assert best_note(data, run_charts(data)[0], record) == ""


def test_note_names_another_monitor_than_the_accuracy() -> None:
    events: list[Event] = [replace(make_run_started(), monitor="rmse", monitor_mode="min")]
    for number, ema in ((1, 0.5), (2, 0.25), (3, 0.5)):
        epoch = replace(make_epoch(number, 0.9), metrics={"rmse": 3.0 - number}, ema_val_loss=1.0)
        events.append(replace(epoch, ema_metrics={"rmse": ema}))
    data, record = curves_of(*events), history_from_events(events).record()
    assert best_note(data, run_charts(data)[1], record) == "★ best rmse 0.2500 @2"


def test_own_metrics_between_0_and_1_are_curves_of_the_accuracy_chart() -> None:
    epochs = [replace(make_epoch(number), metrics={"f1": 0.25, "entropy": 3.0 - number}) for number in (1, 2, 3)]
    data = curves_of(make_run_started(), *epochs)
    assert [(curve.label, curve.is_dashed) for curve in drawn(data, "accuracy")[2:]] == [("f1", True)]
    assert [curve.label for curve in drawn(data, "loss")] == ["train", "val"]


def test_metrics_of_a_task_without_accuracy_have_charts_of_their_own() -> None:
    metrics = {"mae": 9.0, "rmse": 12.0, "r2": -0.5}
    epoch = replace(make_epoch(1), train_accuracy=None, val_accuracy=None, val_top5=None, metrics=metrics)
    data = curves_of(make_run_started(), epoch)
    assert [chart.id for chart in run_charts(data)[:3]] == ["loss", "errors", "scores"]
    assert [(curve.label, curve.series.y.tolist()) for curve in drawn(data, "errors")] == [("mae", [9]), ("rmse", [12])]
    assert (run_charts(data)[2].title, data.count_not_finite(data.names)) == ("r2", 0)
    assert [chart.id for chart in compared_charts([data], [])] == ["metrics.mae", "metrics.rmse", "metrics.r2"]
