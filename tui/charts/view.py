"""The view of the charts of runs: x axis, zoom, pan, smoothing, log scale and cursor; and the curves of one run.

`tui.screens.charts` changes the view on key presses; the data is in `engine.runs.curves`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from engine.base.text import printable
from engine.base.units import format_number, format_score
from engine.report.charts import CHARTS, Chart, MeasuredOn, curve_labels
from engine.runs.curves import X_AXES, Curves, XAxis
from engine.runs.metrics import METRICS, Better, format_metric
from engine.runs.monitor import record_monitor
from engine.runs.run_record import NO_RECORD, RunRecord
from tui.charts.plot import Curve, PlotWindow
from tui.terminal.palette import series_style

SMOOTHING_LEVELS = (0.0, 0.02, 0.1)
CURSOR_STEP_SHARE = 0.01
# Dashes tell the curves of a chart apart where colors cannot.
DASHED = (MeasuredOn.VALIDATION, MeasuredOn.EMA, MeasuredOn.TEST)
COLORS = 6


class Extent(Protocol):
    """Data of charts, of one run or several: how long its x axes are."""

    def last_x(self, axis: XAxis) -> float: ...

    def odd_limits(self, names: Iterable[str], axis: XAxis) -> tuple[float, float] | None: ...


@dataclass(frozen=True)
class ChartView:
    """An immutable view without data. `span` is the visible length of the x axis, None for all of it; `end` is the
    right edge, None to follow the latest point."""

    axis: XAxis = "epoch"
    smoothing: float = 0.0
    log: bool = False
    whole: bool = False
    """Whether the y axes have room for outliers, too."""
    span: float | None = None
    end: float | None = None
    cursor: float | None = None
    axes: tuple[XAxis, ...] = X_AXES
    """The x axes that the data has."""
    charts: Mapping[str, Chart] = field(default_factory=lambda: CHARTS, compare=False)
    """The charts by the ids of their panels."""

    def x_limits(self, data: Extent) -> tuple[float, float]:
        """Return the left and right edge of the visible x axis."""
        last = data.last_x(self.axis)
        end = last if self.end is None else self.end
        return end - (last if self.span is None else self.span), end

    def window(self, data: Extent, chart_id: str) -> PlotWindow:
        """Return the plot window of a chart; only curves of single steps are smoothed, and accuracy has no log
        scale."""
        (low, high), chart = self.x_limits(data), self.charts[chart_id]
        if (limits := data.odd_limits(chart.metrics, self.axis)) is not None:
            # The same part of the axis as in the other charts.
            first, scale = limits[0], (limits[1] - limits[0]) / data.last_x(self.axis)
            low, high = first + low * scale, first + high * scale
        smoothing = self.smoothing if chart.smoothed else 0.0
        return PlotWindow(low, high, self.log and chart.log, smoothing, self.axis, whole=self.whole)

    def settings(self, chart_id: str) -> list[str]:
        """Describe the position of the cursor, log scale and smoothing."""
        words = [] if self.cursor is None else [f"{self.axis} {format_number(self.cursor)}"]
        if self.log and self.charts[chart_id].log:
            words.append("log")
        if self.smoothing and self.charts[chart_id].smoothed:
            words.append(f"smooth {self.smoothing:.0%}")
        return [*words, "whole range"] if self.whole else words

    def next_axis(self) -> ChartView:
        """Switch to the next x axis; zoom and cursor are reset, because they are positions on the old one."""
        axis = self.axes[(self.axes.index(self.axis) + 1) % len(self.axes)]
        return replace(self, axis=axis, span=None, end=None, cursor=None)

    def next_smoothing(self) -> ChartView:
        index = (SMOOTHING_LEVELS.index(self.smoothing) + 1) % len(SMOOTHING_LEVELS)
        return replace(self, smoothing=SMOOTHING_LEVELS[index])

    def reset_zoom(self) -> ChartView:
        return replace(self, span=None, end=None, cursor=None)

    def zoom(self, data: Extent, factor: float) -> ChartView:
        """Scale the visible span by `factor`, around the cursor if there is one.

        Without a cursor, zoom around the middle; a view that follows the latest point keeps its right edge.
        """
        (low, high), last = self.x_limits(data), data.last_x(self.axis)
        span = (high - low) * factor
        if span >= last:
            return replace(self, span=None, end=None)
        if span < last * 1e-6:
            return self
        if self.end is None and self.cursor is None:
            return replace(self, span=span)
        middle = self.cursor if self.cursor is not None else (low + high) / 2
        return replace(self, span=span, end=min(max(middle + span / 2, span), last))

    def pan(self, data: Extent, share: float) -> ChartView:
        """Move the visible span by `share` of its length, positive to the right."""
        (low, high), last = self.x_limits(data), data.last_x(self.axis)
        span = high - low
        end = min(max(high + share * span, span), last)
        # At the right end, follow the latest point again.
        return replace(self, end=None if end >= last else end)

    def move_cursor(self, data: Extent, steps: int) -> ChartView:
        """Move the cursor by `steps` of 1% of the visible span; the first move shows it at the right edge."""
        low, high = self.x_limits(data)
        cursor = high if self.cursor is None else self.cursor + steps * CURSOR_STEP_SHARE * (high - low)
        return replace(self, cursor=min(max(cursor, low), high))


def curves_for(
    data: Curves,
    chart: Chart,
    axis: XAxis,
    record: RunRecord = NO_RECORD,
    latest: Mapping[str, float | None] = {},
) -> list[Curve]:
    """Return the curves of a chart of one run. A star marks the best value of the validation, of a training that of the
    best epoch of its `record`. `latest` has the values that lists and log show, by metric."""
    labels, (best, star_x, _) = curve_labels(chart), _best_of(data, chart, axis, record)
    curves = list[Curve]()
    for index, (name, source) in enumerate(chart.metrics.items()):
        is_dashed = source in DASHED or (source is MeasuredOn.ONLY and len(chart.metrics) > 1)
        style = series_style((chart.color - 1 + index) % COLORS + 1)
        star = star_x if name == best else None
        label, value = printable(labels[name]), latest.get(name)
        curves.append(Curve(label, data.over(name, axis), style, is_dashed, star, latest=value))
    return curves


def best_note(data: Curves, chart: Chart, record: RunRecord = NO_RECORD) -> str:
    """Return the best value of the validation, of a chart that has one."""
    return _best_of(data, chart, "step", record)[2]


def _best_of(data: Curves, chart: Chart, axis: XAxis, record: RunRecord) -> tuple[str, float | None, str]:
    """Return the metric of a chart whose best value is starred, the x position of the star, and a note on the value: of
    a training, those of its best epoch."""
    name = next((name for name, source in chart.metrics.items() if source is MeasuredOn.VALIDATION), "")
    points, is_marked = data.over(name, axis).points, chart.marked is not Better.NEITHER
    epoch, value = record.values.get("best_epoch"), record.values.get("best")
    if name and value is not None and (x := data.end_of_epoch(epoch, axis)) is not None:
        monitor = record_monitor(record)
        label = "best" if monitor is METRICS["best_val_accuracy"] else printable(monitor.label)
        note = f"★ {label} {format_metric(monitor, value)} @{epoch:.0f}" if is_marked else ""
        return f"ema_{name}" if data.has("ema_val_accuracy") else name, x, note
    if data.is_own or not is_marked or not np.isfinite(points.y).any():
        return "", None, ""
    index = int((np.nanargmin if chart.marked is Better.LOW else np.nanargmax)(points.y))
    return name, float(points.x[index]), f"★ best {format_score(float(points.y[index]))}"


def data_notes(data: Curves, chart: Chart) -> list[str]:
    """Return how many values of a chart are not finite, from which step on, where the run went on from an earlier step,
    and how many points are in one block."""
    not_finite = data.count_not_finite(chart.metrics)
    odd = [data.over(name, "step").odd for name in chart.metrics]
    first = min((x[0] for x in odd if len(x)), default=0.0)
    block_size = max((data.block_size(name) for name in chart.metrics), default=1)
    return [
        *([f"× {not_finite:,} not finite from step {int(first):,}"] if not_finite else []),
        *([f"↻ from step {data.restarts[-1]:,}"] if data.restarts else []),
        *([f"blocks of {block_size:,} points"] if block_size > 1 else []),
    ]
