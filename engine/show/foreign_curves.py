"""The curves of a run that another program recorded, in bounded memory.

`CurveReader` adds the points that `engine.foreign` reads; `tui.pollers.foreign_run` runs it in a thread. Each metric
keeps its latest points one by one, and older ones in blocks that grow with the number of points: steps, minimum,
maximum, mean and last value of a block.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.foreign.figures import Figures
from engine.foreign.folders import ForeignRun, RunFollower
from engine.foreign.parameters import Parameters, merge_parameters
from engine.foreign.points import PointColumns, Points
from engine.foreign.reading import EPOCH_NAMES, POLL_BYTES, Reading
from engine.runs.curves import XAxis
from engine.runs.reduced_curves import NO_BLOCKS, BlockSeries
from engine.runs.series import FloatArray, Series
from engine.utils.codec import finite

# Rows of a metric's table; a column is a point, or a block of points that follow each other.
_STEP_LOW, _STEP_HIGH, _EPOCH, _TIME, _LOW, _HIGH, _LAST, _SUM, _FINITE, _SIZE, _NUMBER = range(11)
"""Steps; epoch and time of the first point; minimum, maximum and last value; sum and number of the finite values;
number of points, and that of the last one in the order of reading."""
_NUM_ROWS = 11
# 45 MB for all metrics together: metrics beyond MAX_RUN_METRICS are not read.
MAX_COLUMNS = 1 << 19
MIN_METRIC_COLUMNS, MAX_METRIC_COLUMNS = 256, 4096
MAX_RUN_METRICS = MAX_COLUMNS // MIN_METRIC_COLUMNS
FIRST_COLUMNS = 32
FOREIGN_AXES: tuple[XAxis, ...] = ("step", "epoch", "hours")


@dataclass(frozen=True)
class Extremes(Figures):
    """Also the number of points of a metric, and of those that are not finite. `step` is the highest one of a block if
    the points after it were dropped."""

    count: int
    not_finite: int


class _Metric:
    """The points of one metric."""

    def __init__(self) -> None:
        self._columns: FloatArray = np.empty((_NUM_ROWS, FIRST_COLUMNS))
        self._length = 0

    @property
    def columns(self) -> FloatArray:
        return self._columns[:, : self._length]

    def add(self, points: FloatArray, limit: int) -> None:
        """Add points as columns. Beyond `limit` columns, all but the last point are put together in blocks."""
        position = 0
        while position < points.shape[1]:
            if self._length >= limit:
                self._reduce(limit // 2)
            part = points[:, position : position + limit - self._length]
            self._make_room(part.shape[1], limit)
            self._columns[:, self._length : self._length + part.shape[1]] = part
            self._length += part.shape[1]
            position += part.shape[1]

    def shrink(self, limit: int) -> None:
        """Keep at most about `limit` columns."""
        if self._length > limit:
            self._reduce(limit // 2)
        elif self._columns.shape[1] > limit:
            self._columns = self.columns.copy()

    def _make_room(self, num_columns: int, limit: int) -> None:
        wanted = self._length + num_columns
        if wanted > self._columns.shape[1]:
            grown = np.empty((_NUM_ROWS, min(max(wanted, 2 * self._columns.shape[1]), limit)))
            grown[:, : self._length] = self.columns
            self._columns = grown

    def _reduce(self, max_blocks: int) -> None:
        """Put columns together: at most `max_blocks`, and two for the last point.

        Blocks of 2**n points are halved in number when n grows.
        """
        columns = self.columns
        size = columns[_SIZE]
        block_size = 2.0 ** math.ceil(math.log2(max(size.sum() / max_blocks, 1)))
        blocks = (np.cumsum(size) - size) // block_size
        is_start = np.append(True, np.diff(blocks) != 0)
        # The last value stays exact where the curve ends.
        last = int(np.argmax(columns[_NUMBER]))
        is_start[last : last + 2] = True
        starts = np.flatnonzero(is_start)
        ends = np.append(starts[1:], len(size)) - 1
        reduced = np.empty((_NUM_ROWS, len(starts)))
        for row in (_EPOCH, _TIME):
            reduced[row] = columns[row, starts]
        for row in (_LAST, _NUMBER):
            reduced[row] = columns[row, ends]
        for row in (_SUM, _FINITE, _SIZE):
            reduced[row] = np.add.reduceat(columns[row], starts)
        # fmin and fmax ignore NaN unless all values are NaN.
        for row in (_STEP_LOW, _LOW):
            reduced[row] = np.fmin.reduceat(columns[row], starts)
        for row in (_STEP_HIGH, _HIGH):
            reduced[row] = np.fmax.reduceat(columns[row], starts)
        self._columns, self._length = reduced, len(starts)

    def drop_from(self, step: float) -> None:
        """Forget the points from a step on, with the block that this step is in."""
        self._columns = self.columns[:, self.columns[_STEP_HIGH] < step]
        self._length = self._columns.shape[1]

    def extremes(self) -> Extremes:
        columns = self.columns
        num_points = int(columns[_SIZE].sum())
        if not num_points:
            return Extremes(None, None, None, None, 0, 0)
        low, high = float(np.fmin.reduce(columns[_LOW])), float(np.fmax.reduce(columns[_HIGH]))
        latest = np.argmax(columns[_NUMBER])
        last, step = float(columns[_LAST, latest]), int(columns[_STEP_HIGH, latest])
        not_finite = num_points - int(columns[_FINITE].sum())
        return Extremes(step, finite(last), finite(low), finite(high), num_points, not_finite)


class ForeignCurves:
    """The curves of all metrics of a run, by name. One thread adds points, others may read."""

    def __init__(self, num_logs: int) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, _Metric] = {}
        # A reading voids points of its own log only.
        self._names: list[list[str]] = [[] for _ in range(num_logs)]
        self._last_x: dict[XAxis, tuple[int, float]] = {}
        self._has_epochs = False
        self._limit = MAX_METRIC_COLUMNS
        self._start_time = math.inf
        self.version = 0
        """Changes with the points."""
        self.is_limited = False
        """Whether the run has more metrics than are kept."""
        self.num_points = 0
        """Number of points that were read, also those that were dropped."""

    def add(self, readings: Sequence[Reading]) -> None:
        """Add what a poll of `RunFollower` has found."""
        with self._lock:
            for names, reading in zip(self._names, readings, strict=True):
                if reading.drop_from is not None:
                    self._drop(names, reading.drop_from)
            # A metric may move to another log, which voids the points of the one that had it.
            for names, reading in zip(self._names, readings, strict=True):
                if reading.points:
                    self._add(names, reading.points)

    def _drop(self, names: list[str], step: float) -> None:
        self.version += 1
        for name in names:
            self._metrics[name].drop_from(step)
        if step == -math.inf:
            for name in names:
                del self._metrics[name]
            names.clear()
        if not any(metric.columns.size for metric in self._metrics.values()):
            self._start_time = math.inf

    def _add(self, names: list[str], points: Points) -> None:
        if len(self._metrics) >= MAX_RUN_METRICS:
            self.is_limited = self.is_limited or not points.names <= self._metrics.keys()
            points = points.only(self._metrics.__contains__)
            if not points:
                return
        columns = points.columns()
        order = np.argsort(columns.name_index, kind="stable")
        table = _point_table(columns, first_number=self.num_points)[:, order]
        ends = np.cumsum(np.bincount(columns.name_index, minlength=len(columns.names))).tolist()
        for name in columns.names:
            if name not in self._metrics:
                self._metrics[name] = _Metric()
                names.append(name)
        limit = min(max(MAX_COLUMNS // len(self._metrics), MIN_METRIC_COLUMNS), MAX_METRIC_COLUMNS)
        if limit < self._limit:
            for metric in self._metrics.values():
                metric.shrink(limit)
            self._limit = limit
        for name, start, end in zip(columns.names, [0, *ends], ends, strict=False):
            self._metrics[name].add(table[:, start:end], limit)
        self.version += 1
        self.num_points += len(points)
        self._has_epochs = self._has_epochs or bool(np.isfinite(table[_EPOCH]).any())
        if np.isfinite(table[_TIME]).any():
            self._start_time = min(self._start_time, float(np.nanmin(table[_TIME])))

    @property
    def names(self) -> list[str]:
        """Names of the metrics that have points."""
        with self._lock:
            return [name for name, metric in self._metrics.items() if metric.columns.size]

    @property
    def axes(self) -> tuple[XAxis, ...]:
        """The x axes that the run has: the step, and what it recorded of epochs and times."""
        with self._lock:
            known = {"step": True, "epoch": self._has_epochs or self._epochs() is not None}
            known["hours"] = math.isfinite(self._start_time)
        return tuple(axis for axis in FOREIGN_AXES if known[axis])

    def extremes(self, name: str) -> Extremes:
        """Return the extremes of a metric; those of no points for an unknown one."""
        with self._lock:
            return self._metrics.get(name, _NO_METRIC).extremes()

    def last_x(self, axis: XAxis) -> float:
        """Return the x position of the latest point of all metrics; 1 without one beyond 0."""
        with self._lock:
            version, last = self._last_x.get(axis, (-1, 0.0))
            if version != self.version:
                latest = (self._latest(metric.columns, axis) for metric in self._metrics.values())
                last = max(latest, default=0.0)
                self._last_x[axis] = (self.version, last)
        return last if last > 0 else 1.0

    def _latest(self, columns: FloatArray, axis: XAxis) -> float:
        if not columns.size:
            return 0.0
        positions = columns[_STEP_HIGH] if axis == "step" else self._positions(columns, axis)
        return finite(float(np.fmax.reduce(positions))) or 0.0

    def over(self, name: str, axis: XAxis) -> BlockSeries:
        """Return the curve of a metric over an x axis; an empty one for an unknown metric."""
        with self._lock:
            columns = self._metrics.get(name, _NO_METRIC).columns.copy()
            x = self._positions(columns, axis)
        order = np.argsort(x, kind="stable")
        order = order[np.isfinite(x[order])]
        if not len(order):
            return NO_BLOCKS
        columns, x = columns[:, order], x[order]
        if columns[_SIZE].max() == 1:
            points = Series(x, columns[_LAST])
            return BlockSeries(points, points)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = columns[_SUM] / columns[_FINITE]
        means[~np.isfinite(means)] = math.nan
        low, high, last = columns[_LOW], columns[_HIGH], columns[_LAST]
        # The two points of a block follow the curve.
        is_rising = np.diff(last, prepend=last[0]) >= 0
        pair = np.where(is_rising, [low, high], [high, low])
        return BlockSeries(Series(np.repeat(x, 2), pair.T.reshape(-1)), Series(x, means))

    def block_size(self, name: str) -> int:
        """Return the number of points in the largest block of a metric; 1 if every point is there."""
        with self._lock:
            columns = self._metrics.get(name, _NO_METRIC).columns
            return int(columns[_SIZE].max()) if columns.size else 1

    def _positions(self, columns: FloatArray, axis: XAxis) -> FloatArray:
        steps: FloatArray = (columns[_STEP_LOW] + columns[_STEP_HIGH]) / 2
        if axis == "step":
            return steps
        recorded: FloatArray = columns[_EPOCH] if axis == "epoch" else (columns[_TIME] - self._start_time) / 3600
        if axis == "epoch" and np.isnan(recorded).all() and (epochs := self._epochs()) is not None:
            recorded = np.interp(steps, *epochs)
        return recorded

    def _epochs(self) -> tuple[FloatArray, FloatArray] | None:
        """Return steps and their epochs, for metrics that were recorded without: of a metric that is the epoch, as the
        TensorBoard files of Lightning have it, else of the metric with the most epochs, which another log recorded."""
        named = [self._metrics[name].columns for name in EPOCH_NAMES if name in self._metrics]
        found = next(((columns[_STEP_LOW], columns[_LAST]) for columns in named if columns.size), None)
        if found is None and self._has_epochs:
            columns = max((metric.columns for metric in self._metrics.values()), key=_num_epochs)
            found = columns[_STEP_LOW], columns[_EPOCH]
        if found is None:
            return None
        steps, epochs = found
        order = np.argsort(steps, kind="stable")
        order = order[np.isfinite(epochs[order])]
        return (steps[order], epochs[order]) if len(order) else None


_NO_METRIC = _Metric()


class CurveReader:
    """Reads the curves of a run in slices, as long as somebody asks for more, and then what is appended."""

    def __init__(self, run: ForeignRun) -> None:
        self.run = run
        self.curves = ForeignCurves(len(run.logs))
        """The curves as far as they have been read."""
        self.share = 0.0
        """Part of the bytes that has been read, from 0 to 1."""
        self.problems: tuple[str, ...] = ()
        """What of the logs cannot be read."""
        self.logged_parameters: Parameters = {}
        self.has_ended = False
        """Whether a log says that the run has ended."""
        self.has_more = True
        """Whether there may be more to read now."""
        self._follower = RunFollower(run)
        self._read_bytes: list[int] = []
        self._parameters: Parameters | None = None

    def read(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Read all that is new, unless `stopped`; return whether there was any point."""
        version = self.curves.version
        while self.read_slice() and not stopped():
            pass
        return self.curves.version != version

    def parameters(self) -> Parameters:
        """Return the parameters in the logs and in the files beside them. Any thread may call it."""
        # A read in another thread may set `_parameters` to None at any time.
        parameters = self._parameters
        if parameters is None:
            parameters = self._parameters = self.run.read_parameters() | self.logged_parameters
        return parameters

    def read_slice(self, max_bytes: int = POLL_BYTES) -> bool:
        """Read at most about `max_bytes` of all logs. Return whether there may be more to read now."""
        readings = self._follower.poll(max_bytes)
        self.curves.add(readings)
        for reading in readings:
            self.logged_parameters = merge_parameters(self.logged_parameters, reading.parameters)
        self.has_ended = any(reading.has_ended for reading in readings)
        problems = [reading.problem for reading in readings if reading.problem]
        if self.curves.is_limited:
            problems.append(f"only the first {MAX_RUN_METRICS:,} metrics are read")
        self.problems = tuple(dict.fromkeys(problems))
        before, self._read_bytes = self._read_bytes, [reading.read_bytes for reading in readings]
        total = sum(reading.total_bytes for reading in readings)
        self.share = min(sum(self._read_bytes) / total, 1.0) if total else 1.0
        self.has_more = self._read_bytes != before or any(reading.points for reading in readings)
        self._parameters = None if self.has_more else self._parameters
        return self.has_more


def _num_epochs(columns: FloatArray) -> int:
    return int(np.isfinite(columns[_EPOCH]).sum())


def _point_table(points: PointColumns, *, first_number: int) -> FloatArray:
    """Return a column for each point. A value that is not finite becomes NaN."""
    table = np.empty((_NUM_ROWS, len(points)))
    table[_STEP_LOW] = table[_STEP_HIGH] = points.steps
    table[_EPOCH], table[_TIME] = points.epochs, points.times
    is_finite = np.isfinite(points.values)
    values = np.where(is_finite, points.values, math.nan)
    table[_LOW] = table[_HIGH] = table[_LAST] = values
    table[_FINITE], table[_SUM] = is_finite, np.where(is_finite, values, 0.0)
    table[_SIZE], table[_NUMBER] = 1.0, first_number + np.arange(len(points))
    return table
