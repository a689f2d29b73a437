"""The view of a run's charts: x axis, zoom, pan, smoothing, log scale and cursor.

`tui.screens.run` changes it on key presses; the data is in `engine.runs.curves`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from engine.runs.curves import X_AXES, CurveData, XAxis
from engine.runs.metrics import format_known
from engine.runs.series import Series
from engine.show.charts import CHARTS, Chart, Source
from engine.utils.text import printable
from engine.utils.units import format_number
from tui.charts.plot import Curve, PlotWindow
from tui.palette import series_style

SMOOTHING_LEVELS = (0.0, 0.02, 0.1)
CURSOR_STEP_SHARE = 0.01
# Marker and style of the curves of a run; the frame of a panel has no room for the names of others.
CURVE_STYLES = {
    Source.TRAINING: ("braille", series_style(1)),
    Source.VALIDATION: ("dashed", series_style(2)),
    Source.EMA: ("dashed", series_style(4)),
}
LR_STYLE = series_style(CHARTS["lr"].color)
OWN_METRIC_STYLES = tuple(map(series_style, (3, 5, 6)))


class Extent(Protocol):
    """Data of charts, of one run or several: how long its x axes are."""

    def last_x(self, axis: XAxis) -> float: ...


@dataclass(frozen=True)
class ChartView:
    """An immutable view without data. `span` is the visible length of the x axis, None for all of it; `end` is the
    right edge, None to follow the latest point."""

    axis: XAxis = "epoch"
    smoothing: float = 0.0
    log: bool = False
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
        smoothing = self.smoothing if chart.smoothed else 0.0
        return PlotWindow(low, high, self.log and chart.log, smoothing, self.axis)

    def curves_for(self, data: CurveData, chart_id: str) -> list[Curve]:
        """Return the curves of a chart of the screen of a run. A star marks the best epoch."""
        chart, best, curves = self.charts[chart_id], data.best, list[Curve]()
        starred = None if best is None else Source.EMA if best.of_ema else Source.VALIDATION
        for key, source in chart.metrics.items():
            series = _series_of(data, key, self.axis)
            if source is Source.ONLY:
                curves.append(Curve("", series, "braille", series_style(chart.color)))
            elif source in CURVE_STYLES and (source is not Source.EMA or np.isfinite(series.y).any()):
                star_x = None
                if best is not None and source is starred:
                    star_x = float(data.x_positions(np.array([best.step]), self.axis)[0])
                curves.append(Curve(source.value, series, *CURVE_STYLES[source], star_x))
        return curves + (self._own_curves(data) if chart_id == "accuracy" else [])

    def _own_curves(self, data: CurveData) -> list[Curve]:
        """Return the user's own metrics that share the scale of the accuracy, 0 to 1."""
        shares = [
            (name, series)
            for name, series in data.own_metrics(self.axis).items()
            if np.isfinite(series.y).any() and np.nanmin(series.y) >= 0 and np.nanmax(series.y) <= 1
        ]
        return [
            Curve(printable(name), series, "dashed", style)
            for (name, series), style in zip(shares, OWN_METRIC_STYLES, strict=False)
        ]

    def best_note(self, data: CurveData, chart_id: str) -> str:
        """Return the best validation accuracy and its epoch, for the accuracy chart."""
        best = data.best if chart_id == "accuracy" else None
        return "" if best is None else f"★ best {format_known('best_val_accuracy', best.accuracy)} @{best.epoch}"

    def subtitle(self, data: CurveData, chart_id: str) -> str:
        """Describe the position of the cursor, log scale, smoothing, and the number of non-finite values."""
        words = self.settings(chart_id)
        if data.nonfinite_count and chart_id == "loss":
            words.append(f"{data.nonfinite_count} not finite")
        return "  ".join(words)

    def settings(self, chart_id: str) -> list[str]:
        """Describe the position of the cursor, log scale and smoothing."""
        words = [] if self.cursor is None else [f"{self.axis} {format_number(self.cursor)}"]
        if self.log and self.charts[chart_id].log:
            words.append("log")
        if self.smoothing and self.charts[chart_id].smoothed:
            words.append(f"smooth {self.smoothing:.0%}")
        return words

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


def _series_of(data: CurveData, key: str, axis: XAxis) -> Series:
    """Return a metric of each step, if it is known for each, else of each epoch."""
    match key:
        case "train_loss":
            return data.train_loss(axis)
        case "lr" | "grad_norm":
            return data.step_metric(key, axis)
    return data.epoch_metric(key, axis)
