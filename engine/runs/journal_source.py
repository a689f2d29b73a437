"""The journal of a training as a source of points, like the logs that other programs write (`engine.watch`).

It is the only source that tells more than points: `on_event` gets each event, for the states of the run, and
`on_replaced` is called when the journal was replaced, which voids those before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from engine.base.codec import UNSET
from engine.config.monitor import DEFAULT_MONITOR
from engine.runs.events import EpochEvent, Event, RunContinued, RunPaused, RunResumed, RunStarted, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import JournalReader
from engine.runs.metrics import METRICS, STEP_QUANTITIES, own_metric
from engine.runs.monitor import monitor_of
from engine.runs.series import FloatArray
from engine.watch.folders import ForeignRun
from engine.watch.points import Point, PointColumns, Points, StepAxes
from engine.watch.reading import POLL_BYTES, Log, Reading

MAX_STEP_COLUMNS = 1 << 15
"""Points and blocks of each curve on the screen of a run, 3 MB for a curve of the steps: up to 32,768 steps are exact,
and a hundredth of a million steps still has 150 blocks."""
EPOCH_LOSS = "train_loss_epoch"
"""Name of the mean training loss of each epoch; `train_loss` has that of each step."""
_STEP_FIELDS = ("lr", *STEP_QUANTITIES)
STEP_METRICS = ("train_loss", *_STEP_FIELDS)
"""Metrics with values of steps; all others have one for each epoch."""
# Metrics of an epoch that each epoch has: without a finite value, the curve has a gap.
LOSSES = ("train_loss", "val_loss", "best_val_loss")
RESULTS = (*LOSSES, "train_accuracy", "val_accuracy", "best_val_accuracy")
"""With those of a task that has an accuracy."""
COUNTED = (EPOCH_LOSS, "train_loss", "train_accuracy", "val_loss", "val_accuracy")
"""Metrics whose values that are not finite are counted."""


class JournalPoints:
    """Turns the events of a journal, in their order, into points: losses and quantities of steps, metrics of epochs.

    The time of a point is the training time in seconds, without pauses and the gaps between sessions.
    """

    def __init__(self) -> None:
        self._axes, self._monitor = StepAxes(0), monitor_of(DEFAULT_MONITOR)
        self._step, self._trained_s = 0, 0.0
        """The latest step with an event, and its training time."""
        self._offset_s = 0.0
        """Added to the time of an event, the sum is its training time."""
        self._pause_start: float | None = None
        self._steps: list[StepEvent] = []
        """Those whose points are not made yet."""

    def read(self, events: Iterable[Event]) -> Reading:
        """Return the points of events. A resumed run voids those of the steps after its checkpoint."""
        reading = Reading()
        for event in events:
            match event:
                case StepEvent():
                    self._steps.append(event)
                case EpochEvent():
                    reading.points.extend(self._epoch_points(event))
                case RunStarted():
                    self._add_steps(reading.points)
                    self._start_session(event, reading)
                case RunPaused():
                    self._pause_start = event.time
                case RunContinued():
                    self._add_steps(reading.points)
                    self._offset_s -= event.time - (self._pause_start or event.time)
                    self._pause_start = None
        self._add_steps(reading.points)
        reading.axes = self._axes
        return reading

    def _start_session(self, event: RunStarted, reading: Reading) -> None:
        first_step = event.from_step if isinstance(event, RunResumed) else 0
        self._axes, self._monitor = StepAxes(event.steps_per_epoch), monitor_of(event.monitor, event.monitor_mode)
        self._offset_s, self._pause_start, self._step = self._trained_s - event.time, None, first_step
        if isinstance(event, RunResumed):
            reading.void_from(first_step + 1)

    def _add_steps(self, points: Points) -> None:
        """Add the points of the step events that have been read."""
        events = [event for event in self._steps if event.step >= len(event.losses)]
        self._steps = []
        if not events:
            return
        lengths = [len(event.losses) for event in events]
        ends = np.array([event.step for event in events], np.int64)
        times = np.array([event.time for event in events]) + self._offset_s
        losses = np.array([loss for event in events for loss in event.losses], np.float64)
        steps = np.repeat(ends - np.cumsum(lengths), lengths) + np.arange(1, len(losses) + 1)
        loss_times = np.interp(steps, [self._step, *ends], [self._trained_s, *times])
        points.add_columns(_columns("train_loss", steps, losses, loss_times))
        for name in _STEP_FIELDS:
            values = [getattr(event, name) for event in events]
            known = [index for index, value in enumerate(values) if value is not UNSET]
            numbers = np.array([values[index] for index in known], np.float64)
            points.add_columns(_columns(name, ends[known], numbers, times[known]))
        self._step, self._trained_s = int(ends[-1]), float(times[-1])

    def _epoch_points(self, event: EpochEvent) -> Iterable[Point]:
        """Yield the metrics of an epoch that are known. Its results have gaps where they are not finite."""
        values = {key: metric.of_epoch(event) for key, metric in METRICS.items() if metric.epoch is not None}
        has_accuracy = event.train_accuracy is not None or event.val_accuracy is not None
        results = RESULTS if has_accuracy else LOSSES
        values = {key: value for key, value in values.items() if value is not None or key in results}
        values[EPOCH_LOSS] = values["train_loss"]
        values |= {own_metric(name).key: value for name, value in event.metrics.items()}
        if self._monitor.key not in METRICS:
            values[self._monitor.key] = self._monitor.of_epoch(event)
        time = self._steps[-1].time + self._offset_s if self._steps else self._trained_s
        for name, value in values.items():
            if name not in STEP_METRICS:
                yield Point(name, event.step, math.nan if value is None else value, event.epoch, time)


def _columns(name: str, steps: np.ndarray, values: FloatArray, times: FloatArray) -> PointColumns:
    count = len(steps)
    return PointColumns((name,), np.zeros(count, np.int16), steps, values, np.full(count, np.nan), times)


class JournalSource:
    """Follows the journal of a training."""

    def __init__(
        self,
        path: Path,
        on_event: Callable[[Event], object] = lambda event: None,
        on_replaced: Callable[[], object] = lambda: None,
    ) -> None:
        self._journal, self._on_event, self._on_replaced = JournalReader(path), on_event, on_replaced
        self._points = JournalPoints()

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read the events of at most about `max_bytes`."""
        events = list(self._journal.poll(max_bytes))
        if was_replaced := self._journal.was_replaced:
            self._points = JournalPoints()
            self._on_replaced()
        reading = self._points.read(events)
        if was_replaced:
            reading.drop_from = -math.inf
        for event in events:
            self._on_event(event)
        reading.read_bytes, reading.total_bytes = self._journal.offset, self._journal.size
        reading.problem = self._journal.problem
        return reading


def journal_run(
    folder: RunFolder,
    on_event: Callable[[Event], object] = lambda event: None,
    on_replaced: Callable[[], object] = lambda: None,
) -> ForeignRun:
    """Return a run whose only log is its journal, for `CurveReader`."""
    log = Log("journal", (folder.journal,), lambda: JournalSource(folder.journal, on_event, on_replaced))
    return ForeignRun(folder.name, folder.path, (log,), str(folder.path))
