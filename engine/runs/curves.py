"""Curve data of a run: journal events accumulated into arrays.

`tui.screens.run` adds the events as they arrive, `engine.report` adds all of them at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.runs.events import EpochEvent, Event, RunContinued, RunPaused, RunResumed, RunStarted, StepEvent
from engine.runs.metrics import METRIC_PREFIX, METRICS, own_metric
from engine.runs.series import FloatArray, Series
from engine.utils.codec import Count, Finite, Number, Record, finite, or_none

XAxis = Literal["epoch", "step", "images", "hours"]
X_AXES: tuple[XAxis, ...] = ("epoch", "step", "images", "hours")


# A corrupt journal may claim any step; this bounds the memory for steps whose losses are missing.
MAX_MISSING_STEPS = 10_000_000
# More curves of the user's own metrics than a chart can show.
MAX_OWN_METRICS = 64


class GrowingArray:
    """A float array that grows on demand; unset values are NaN."""

    def __init__(self) -> None:
        self._values = np.full(1024, np.nan)
        self.length = 0

    def set(self, start: int, values: FloatArray | list[float | None]) -> None:
        """Set the values from index `start` on; a gap before `start` is filled with NaN, and None becomes NaN."""
        end = start + len(values)
        if end > len(self._values):
            grown = np.full(max(end, 2 * len(self._values)), np.nan)
            grown[: self.length] = self._values[: self.length]
            self._values = grown
        self._values[start:end] = values
        self.length = max(self.length, end)

    def append(self, value: float | None) -> None:
        """Append a value; None becomes NaN."""
        if self.length == len(self._values):
            self.set(self.length, np.array([math.nan]))
            self.length -= 1
        self._values[self.length] = math.nan if value is None else value
        self.length += 1

    def truncate(self, length: int) -> None:
        if length < self.length:
            self._values[length : self.length] = np.nan
            self.length = length

    @property
    def values(self) -> FloatArray:
        return self._values[: self.length]


@dataclass(frozen=True, eq=False)
class StepAxes:
    """Converts steps to positions on the x axes."""

    steps_per_epoch: int
    times: Series
    """Seconds of training at some steps."""
    sessions: Series
    """Global batch size (`y`) of the steps after step `x`: a resumed session may have another one."""

    def knows(self, axis: XAxis) -> bool:
        """Whether steps have positions on an axis."""
        match axis:
            case "epoch":
                return self.steps_per_epoch > 0
            case "hours":
                return len(self.times.x) > 0
            case "images":
                return len(self.sessions.x) > 0
        return True

    def positions(self, steps: FloatArray, axis: XAxis) -> FloatArray:
        """Return epochs, steps, images or hours of training; steps where the axis is unknown."""
        if axis == "epoch" and self.steps_per_epoch > 0:
            return steps / self.steps_per_epoch
        if axis == "hours" and len(self.times.x):
            hours: FloatArray = np.interp(steps, self.times.x, self.times.y) / 3600
            return hours
        if axis == "images" and len(self.sessions.x):
            starts, batches = self.sessions.x, self.sessions.y
            before = np.append(0.0, np.cumsum(np.diff(starts) * batches[:-1]))
            session = np.maximum(np.searchsorted(starts, steps, "right") - 1, 0)
            images: FloatArray = before[session] + (steps - starts[session]) * batches[session]
            return images
        return steps


class BestEpoch(Record, frozen=True, kw_only=True):
    """The epoch with the highest validation accuracy, of the EMA weights if there are any, and its last step."""

    epoch: Count
    step: Number
    accuracy: Finite
    of_ema: bool


class CurveData:
    """The curves of one run. `version` increases with every change."""

    def __init__(self) -> None:
        self.version = 0
        self.reset()

    def reset(self) -> None:
        """Discard all events."""
        self.version += 1
        self.steps_per_epoch = 0
        self.nonfinite_count = 0
        """Number of losses and epoch metrics that are NaN or infinite, those of the EMA weights excluded."""
        self._losses = GrowingArray()
        """Training loss of each step, starting with step 1."""
        self._missing_steps_left = MAX_MISSING_STEPS
        self._step_positions: dict[XAxis, GrowingArray] = {}
        """x positions of those steps, per axis."""
        self._step_events = {name: GrowingArray() for name in ("step", "time", "lr", "grad_norm")}
        """Columns of the `step` events."""
        self._epoch_events = {name: GrowingArray() for name in ("epoch", "step")}
        """Columns of the `epoch` events."""
        self._metrics = {key: metric for key, metric in METRICS.items() if metric.epoch is not None}
        """Metrics of the epochs by their key, also the user's own ones (`eval.metrics`)."""
        self._epoch_metrics = {key: GrowingArray() for key in self._metrics}
        """Their values in each epoch; NaN where unknown."""
        self._time_offset_s = 0.0
        """Added to the time of an event; the sum is its training time, without pauses and gaps between sessions."""
        self._pause_start: float | None = None
        self._sessions: list[tuple[int, int]] = []
        """Last step before each session, and the global batch size of the session."""

    def add_events(self, events: Iterable[Event] | None) -> None:
        """Add events in journal order. None means that the journal was recreated, so all curves are reset."""
        if events is None:
            self.reset()
        for event in events or ():
            self.add(event)

    def add(self, event: Event) -> None:
        """Add one event; events must come in journal order."""
        match event:
            case RunStarted():
                first_step = max(event.from_step, 0) if isinstance(event, RunResumed) else 0
                if event.steps_per_epoch != self.steps_per_epoch or first_step == 0:
                    self._step_positions.clear()
                self.steps_per_epoch = event.steps_per_epoch
                del self._sessions[bisect_left(self._sessions, (first_step,)) :]
                self._sessions.append((first_step, event.global_batch))
                trained = float(self._step_events["time"].values[-1]) if self._step_events["time"].length else 0.0
                if isinstance(event, RunResumed):
                    self._truncate_after(event.from_step)
                self._time_offset_s, self._pause_start = trained - event.time, None
            case RunPaused():
                self._pause_start = event.time
            case RunContinued():
                self._time_offset_s -= event.time - (self._pause_start or event.time)
                self._pause_start = None
            case StepEvent():
                first = event.step - len(event.losses)
                gap = max(first - self._losses.length, 0)
                if first < 0 or gap > self._missing_steps_left:
                    return
                self._missing_steps_left -= gap
                self.nonfinite_count += event.losses.count(None)
                self._losses.set(first, event.losses)
                columns = self._step_events
                columns["step"].append(event.step)
                columns["time"].append(event.time + self._time_offset_s)
                columns["lr"].append(event.lr)
                columns["grad_norm"].append(or_none(event.grad_norm))
            case EpochEvent():
                self._add_own_metrics(event)
                results = (event.train_loss, event.train_accuracy, event.val_loss, event.val_accuracy)
                self.nonfinite_count += results.count(None)
                self._epoch_events["epoch"].append(event.epoch)
                self._epoch_events["step"].append(event.step)
                for key, numbers in self._epoch_metrics.items():
                    numbers.append(self._metrics[key].of_epoch(event))
            case _:
                return
        self.version += 1

    def _add_own_metrics(self, event: EpochEvent) -> None:
        """Add the metrics that only this epoch has, before its values are added."""
        for metric in map(own_metric, event.metrics):
            if metric.key not in self._metrics and len(self._metrics) < len(METRICS) + MAX_OWN_METRICS:
                self._metrics[metric.key], self._epoch_metrics[metric.key] = metric, GrowingArray()
                self._epoch_metrics[metric.key].set(0, [math.nan] * self._epoch_events["epoch"].length)

    def _truncate_after(self, step: int) -> None:
        self._losses.truncate(step)
        self._step_positions.clear()
        step_columns = [*self._step_events.values()]
        epoch_columns = [*self._epoch_events.values(), *self._epoch_metrics.values()]
        for steps, columns in ((self._step_events["step"], step_columns), (self._epoch_events["step"], epoch_columns)):
            kept = int(np.searchsorted(steps.values, step, "right"))
            for numbers in columns:
                numbers.truncate(kept)

    @property
    def last_step(self) -> int:
        last = self._epoch_events["step"].values[-1] if self._epoch_events["step"].length else 0
        return max(self._losses.length, int(last))

    def last_x(self, axis: XAxis) -> float:
        """Return the x position of the latest step; 1 before the first step."""
        position = float(self.x_positions(np.array([float(max(self.last_step, 1))]), axis)[0])
        return position if position > 0 else 1.0

    def train_loss(self, axis: XAxis) -> Series:
        """Return the training loss of every step."""
        positions, length = self._step_positions.setdefault(axis, GrowingArray()), self._losses.length
        if positions.length < length:
            # There may be millions of steps, so compute only the positions that are new.
            positions.set(positions.length, self.x_positions(np.arange(positions.length + 1.0, length + 1.0), axis))
        return Series(positions.values[:length], self._losses.values)

    def epoch_metric(self, key: str, axis: XAxis) -> Series:
        """Return a metric of the epochs, such as `val_loss`, `ema_val_accuracy` or `metrics.NAME`."""
        return Series(self.x_positions(self._epoch_events["step"].values, axis), self._epoch_metrics[key].values)

    def epoch_metrics(self, axis: XAxis) -> dict[str, Series]:
        """Return all metrics of the epochs by key, the user's own ones as `metrics.NAME`."""
        return {key: self.epoch_metric(key, axis) for key in self._metrics}

    def own_metrics(self, axis: XAxis) -> dict[str, Series]:
        """Return the user's own metrics by name."""
        own = [key for key in self._metrics if key.startswith(METRIC_PREFIX)]
        return {key.removeprefix(METRIC_PREFIX): self.epoch_metric(key, axis) for key in own}

    def step_metric(self, name: Literal["lr", "grad_norm"], axis: XAxis) -> Series:
        """Return the learning rate or the gradient norm at every `step` event."""
        return Series(self.x_positions(self._step_events["step"].values, axis), self._step_events[name].values)

    @property
    def has_grad_norm(self) -> bool:
        """Whether the journal has gradient norms."""
        return bool(np.isfinite(self._step_events["grad_norm"].values).any())

    @property
    def best(self) -> BestEpoch | None:
        """The best epoch, see `Metric.best_of`; None without a validation accuracy."""
        ema, selection, losses = (
            self._epoch_metrics[key].values for key in ("ema_val_accuracy", "best_val_accuracy", "best_val_loss")
        )
        if not np.isfinite(selection).any():
            return None
        best = METRICS["best_val_accuracy"]
        equals = np.flatnonzero(selection == np.nanmax(selection)).tolist()
        index = max(equals, key=lambda at: best.rank(float(selection[at]), finite(float(losses[at])), at))
        epoch, step = (self._epoch_events[name].values[index] for name in ("epoch", "step"))
        return BestEpoch(
            epoch=int(epoch),
            step=float(step),
            accuracy=float(selection[index]),
            of_ema=bool(np.isfinite(ema[index])),
        )

    def x_positions(self, steps: FloatArray, axis: XAxis) -> FloatArray:
        """Convert steps to positions on an x axis: epochs, steps, images or hours of training."""
        return self.axes.positions(steps, axis)

    @property
    def axes(self) -> StepAxes:
        """The x axes; their arrays change with the next event."""
        starts, batches = zip(*self._sessions, strict=True) if self._sessions else ((), ())
        return StepAxes(
            self.steps_per_epoch,
            Series(self._step_events["step"].values, self._step_events["time"].values),
            Series(np.array(starts, np.float64), np.maximum(np.array(batches, np.float64), 0.0)),
        )
