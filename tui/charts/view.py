"""The view of a run's charts: x axis, zoom, pan, smoothing, log scale and cursor.

`tui.screens.run` changes it on key presses; the data is in `tui.charts.curves`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tui.charts.axis import format_number
from tui.charts.curves import X_AXES, CurveData, XAxis
from tui.charts.plot import Curve, PlotWindow
from tui.palette import series_style

SMOOTHING_LEVELS = (0.0, 0.02, 0.1)
CURSOR_STEP_SHARE = 0.01
TRAIN_STYLE, VALIDATION_STYLE, LR_STYLE, EMA_STYLE = map(series_style, (1, 2, 3, 4))
VALIDATION_MARKER = "•"


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

    def x_limits(self, data: CurveData) -> tuple[float, float]:
        """Return the left and right edge of the visible x axis."""
        last = data.last_x(self.axis)
        end = last if self.end is None else self.end
        return end - (last if self.span is None else self.span), end

    def window(self, data: CurveData, chart_id: str) -> PlotWindow:
        """Return the plot window of a chart; only the loss is smoothed, and accuracy has no log scale."""
        low, high = self.x_limits(data)
        smoothing = self.smoothing if chart_id == "loss" else 0.0
        return PlotWindow(low, high, self.log and chart_id != "accuracy", smoothing)

    def curves_for(self, data: CurveData, chart_id: str) -> list[Curve]:
        """Return the curves of the chart `loss`, `accuracy` or `lr`."""
        if chart_id == "lr":
            return [Curve("", data.lr(self.axis), "braille", LR_STYLE)]
        train = data.train_loss(self.axis) if chart_id == "loss" else data.epoch_metric("train_accuracy", self.axis)
        curves = [
            Curve("train", train, "braille", TRAIN_STYLE),
            Curve("val", data.epoch_metric(f"val_{chart_id}", self.axis), VALIDATION_MARKER, VALIDATION_STYLE),
        ]
        averaged = data.epoch_metric(f"ema_val_{chart_id}", self.axis)
        if np.isfinite(averaged.y).any():
            curves.append(Curve("ema", averaged, VALIDATION_MARKER, EMA_STYLE))
        return curves

    def subtitle(self, data: CurveData, chart_id: str) -> str:
        """Describe the x axis or cursor position, log scale, smoothing, and the number of non-finite values."""
        words = [self.axis if self.cursor is None else f"{self.axis} {format_number(self.cursor)}"]
        if self.log and chart_id != "accuracy":
            words.append("log")
        if self.smoothing and chart_id == "loss":
            words.append(f"smooth {self.smoothing:.0%}")
        if data.nonfinite_count and chart_id == "loss":
            words.append(f"{data.nonfinite_count} not finite")
        return "  ".join(words)

    def next_axis(self) -> ChartView:
        """Switch to the next x axis; zoom and cursor are reset, because they are positions on the old one."""
        axis = X_AXES[(X_AXES.index(self.axis) + 1) % len(X_AXES)]
        return replace(self, axis=axis, span=None, end=None, cursor=None)

    def next_smoothing(self) -> ChartView:
        index = (SMOOTHING_LEVELS.index(self.smoothing) + 1) % len(SMOOTHING_LEVELS)
        return replace(self, smoothing=SMOOTHING_LEVELS[index])

    def reset_zoom(self) -> ChartView:
        return replace(self, span=None, end=None, cursor=None)

    def zoom(self, data: CurveData, factor: float) -> ChartView:
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

    def pan(self, data: CurveData, share: float) -> ChartView:
        """Move the visible span by `share` of its length, positive to the right."""
        (low, high), last = self.x_limits(data), data.last_x(self.axis)
        span = high - low
        end = min(max(high + share * span, span), last)
        # At the right end, follow the latest point again.
        return replace(self, end=None if end >= last else end)

    def move_cursor(self, data: CurveData, steps: int) -> ChartView:
        """Move the cursor by `steps` of 1% of the visible span; the first move shows it at the right edge."""
        low, high = self.x_limits(data)
        cursor = high if self.cursor is None else self.cursor + steps * CURSOR_STEP_SHARE * (high - low)
        return replace(self, cursor=min(max(cursor, low), high))
