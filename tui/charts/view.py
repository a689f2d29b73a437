"""What of a run's curves is seen: over which axis, from where to where, how smooth; and the cursor that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.runs.events import Event
from tui.charts.axis import short_number
from tui.charts.curves import X_AXES, Curves, XAxis
from tui.charts.plot import Curve, Window

SMOOTHINGS = (0.0, 0.02, 0.1)
CURSOR_SHARE = 0.01
TRAIN_COLOUR, VALIDATION_COLOUR, LR_COLOUR, EMA_COLOUR = 75, 214, 36, 177
VALIDATION_SIGN = "•"


@dataclass(frozen=True)
class View:
    """`span` is how much of the axis is seen, None for all; `end` is where that ends, None for the latest point."""

    curves: Curves = field(default_factory=Curves)
    axis: XAxis = "epoch"
    smoothing: float = 0.0
    log: bool = False
    span: float | None = None
    end: float | None = None
    cursor: float | None = None

    def take(self, batch: Sequence[Event] | None) -> None:
        """None: the journal began anew."""
        if batch is None:
            self.curves.forget()
        for event in batch or ():
            self.curves.add(event)

    @property
    def last(self) -> float:
        place = float(self.curves.place(np.array([float(max(self.curves.last_step, 1))]), self.axis)[0])
        return place if place > 0 else 1.0

    @property
    def limits(self) -> tuple[float, float]:
        end = self.last if self.end is None else self.end
        span = self.last if self.span is None else self.span
        return end - span, end

    def window(self, name: str) -> Window:
        low, high = self.limits
        smoothing = self.smoothing if name == "loss" else 0.0
        return Window(low, high, self.log and name != "accuracy", smoothing)

    def curves_of(self, name: str) -> list[Curve]:
        if name == "lr":
            return [Curve("", self.curves.lr(self.axis), "braille", LR_COLOUR)]
        validation = self.curves.of_epochs(f"val_{name}", self.axis)
        train = (
            self.curves.train_loss(self.axis) if name == "loss" else self.curves.of_epochs("train_accuracy", self.axis)
        )
        curves = [
            Curve("train", train, "braille", TRAIN_COLOUR),
            Curve("val", validation, VALIDATION_SIGN, VALIDATION_COLOUR),
        ]
        averaged = self.curves.of_epochs(f"ema_val_{name}", self.axis)
        if np.isfinite(averaged.y).any():
            curves.append(Curve("ema", averaged, VALIDATION_SIGN, EMA_COLOUR))
        return curves

    def note(self, name: str) -> str:
        """What is not plain to see: the axis, the scale, and what cannot be drawn."""
        words = [self.axis if self.cursor is None else f"{self.axis} {short_number(self.cursor)}"]
        if self.log and name != "accuracy":
            words.append("log")
        if self.smoothing and name == "loss":
            words.append(f"smooth {self.smoothing:.0%}")
        if self.curves.unreadable and name == "loss":
            words.append(f"{self.curves.unreadable} not finite")
        return "  ".join(words)

    def next_axis(self) -> View:
        axis = X_AXES[(X_AXES.index(self.axis) + 1) % len(X_AXES)]
        return replace(self, axis=axis, span=None, end=None, cursor=None)

    def next_smoothing(self) -> View:
        place = (SMOOTHINGS.index(self.smoothing) + 1) % len(SMOOTHINGS)
        return replace(self, smoothing=SMOOTHINGS[place])

    def whole(self) -> View:
        return replace(self, span=None, end=None, cursor=None)

    def zoom(self, factor: float) -> View:
        """Around the cursor where there is one, else around the middle; the latest point stays in view."""
        low, high = self.limits
        span = (high - low) * factor
        if span >= self.last:
            return replace(self, span=None, end=None)
        if span < self.last * 1e-6:
            return self
        if self.end is None and self.cursor is None:
            return replace(self, span=span)
        middle = self.cursor if self.cursor is not None else (low + high) / 2
        return replace(self, span=span, end=min(max(middle + span / 2, span), self.last))

    def pan(self, share: float) -> View:
        low, high = self.limits
        span = high - low
        end = min(max(high + share * span, span), self.last)
        # At the end it goes on with what comes.
        return replace(self, span=self.span, end=None if end >= self.last else end)

    def move_cursor(self, columns: int) -> View:
        low, high = self.limits
        place = high if self.cursor is None else self.cursor + columns * CURSOR_SHARE * (high - low)
        return replace(self, cursor=min(max(place, low), high))
