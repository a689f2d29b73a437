"""Which part of a run's curves is visible: over which axis, from where to where, how smooth; and the cursor that reads
them. The curves themselves are `tui.charts.curves`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tui.charts.axis import short_number
from tui.charts.curves import X_AXES, Curves, XAxis
from tui.charts.plot import Curve, Window

SMOOTHINGS = (0.0, 0.02, 0.1)
CURSOR_SHARE = 0.01
TRAIN_COLOUR, VALIDATION_COLOUR, LR_COLOUR, EMA_COLOUR = 75, 214, 36, 177
VALIDATION_SIGN = "•"


@dataclass(frozen=True)
class View:
    """The visible window, without the data that is looked at. `span` is the visible length of the axis, None for all;
    `end` is where it ends, None for the latest point."""

    axis: XAxis = "epoch"
    smoothing: float = 0.0
    log: bool = False
    span: float | None = None
    end: float | None = None
    cursor: float | None = None

    def limits(self, data: Curves) -> tuple[float, float]:
        last = data.last_x(self.axis)
        end = last if self.end is None else self.end
        return end - (last if self.span is None else self.span), end

    def window(self, data: Curves, name: str) -> Window:
        low, high = self.limits(data)
        smoothing = self.smoothing if name == "loss" else 0.0
        return Window(low, high, self.log and name != "accuracy", smoothing)

    def curves_of(self, data: Curves, name: str) -> list[Curve]:
        if name == "lr":
            return [Curve("", data.lr(self.axis), "braille", LR_COLOUR)]
        train = data.train_loss(self.axis) if name == "loss" else data.of_epochs("train_accuracy", self.axis)
        curves = [
            Curve("train", train, "braille", TRAIN_COLOUR),
            Curve("val", data.of_epochs(f"val_{name}", self.axis), VALIDATION_SIGN, VALIDATION_COLOUR),
        ]
        averaged = data.of_epochs(f"ema_val_{name}", self.axis)
        if np.isfinite(averaged.y).any():
            curves.append(Curve("ema", averaged, VALIDATION_SIGN, EMA_COLOUR))
        return curves

    def note(self, data: Curves, name: str) -> str:
        """What is not plain to see: the axis, the scale, and what cannot be drawn."""
        words = [self.axis if self.cursor is None else f"{self.axis} {short_number(self.cursor)}"]
        if self.log and name != "accuracy":
            words.append("log")
        if self.smoothing and name == "loss":
            words.append(f"smooth {self.smoothing:.0%}")
        if data.unreadable and name == "loss":
            words.append(f"{data.unreadable} not finite")
        return "  ".join(words)

    def next_axis(self) -> View:
        axis = X_AXES[(X_AXES.index(self.axis) + 1) % len(X_AXES)]
        return replace(self, axis=axis, span=None, end=None, cursor=None)

    def next_smoothing(self) -> View:
        place = (SMOOTHINGS.index(self.smoothing) + 1) % len(SMOOTHINGS)
        return replace(self, smoothing=SMOOTHINGS[place])

    def whole(self) -> View:
        return replace(self, span=None, end=None, cursor=None)

    def zoom(self, data: Curves, factor: float) -> View:
        """Around the cursor where there is one, else around the middle; the latest point stays in view."""
        (low, high), last = self.limits(data), data.last_x(self.axis)
        span = (high - low) * factor
        if span >= last:
            return replace(self, span=None, end=None)
        if span < last * 1e-6:
            return self
        if self.end is None and self.cursor is None:
            return replace(self, span=span)
        middle = self.cursor if self.cursor is not None else (low + high) / 2
        return replace(self, span=span, end=min(max(middle + span / 2, span), last))

    def pan(self, data: Curves, share: float) -> View:
        (low, high), last = self.limits(data), data.last_x(self.axis)
        span = high - low
        end = min(max(high + share * span, span), last)
        # At the end it goes on with what comes.
        return replace(self, end=None if end >= last else end)

    def move_cursor(self, data: Curves, columns: int) -> View:
        low, high = self.limits(data)
        place = high if self.cursor is None else self.cursor + columns * CURSOR_SHARE * (high - low)
        return replace(self, cursor=min(max(place, low), high))
