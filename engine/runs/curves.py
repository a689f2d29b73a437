"""The curves of a run in bounded memory: the one store that screens, comparisons, reports and figures read.

A source yields the points of a run: `engine.runs.journal_source` those of a training, `engine.watch` those that other
programs record. `CurveReader` reads sources into a store. Each metric keeps its latest points one by one,
and older ones in blocks that grow with the number of points: steps, minimum, maximum, mean and last value of a block.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.base.codec import finite
from engine.runs.foreign_record import metric_keys
from engine.runs.metric_rules import renaming_of
from engine.runs.metrics import METRIC_PREFIX
from engine.runs.series import (
    EPOCH,
    FINITE,
    HIGH,
    LAST,
    LOW,
    NO_BLOCKS,
    NUMBER,
    SIZE,
    STEP_HIGH,
    STEP_LOW,
    SUM,
    TIME,
    Blocks,
    BlockSeries,
    FloatArray,
    Series,
    point_table,
)
from engine.watch.figures import Figures
from engine.watch.folders import ForeignRun, RunFollower
from engine.watch.parameters import Parameters, merge_parameters
from engine.watch.points import Points, StepAxes
from engine.watch.reading import EPOCH_NAMES, POLL_BYTES, UNIX_TIMES, Reading
from engine.watch.restarts import restart_note

Value = TypeVar("Value")
XAxis = Literal["epoch", "step", "hours"]
X_AXES: tuple[XAxis, ...] = ("epoch", "step", "hours")
"""Those of a training, its first one first; the logs of other programs have `FOREIGN_AXES`."""
FOREIGN_AXES: tuple[XAxis, ...] = ("step", "epoch", "hours")

# 45 MB for all metrics together: metrics beyond MAX_RUN_METRICS are not read.
MAX_COLUMNS = 1 << 19
# A terminal has 500 columns of two dots at most: half of MAX_METRIC_COLUMNS zooms in twice without a loss.
MIN_METRIC_COLUMNS, MAX_METRIC_COLUMNS = 256, 4096
MAX_RUN_METRICS = MAX_COLUMNS // MIN_METRIC_COLUMNS
# A curve of fewer points has values of epochs rather than of steps, and is not averaged.
MIN_SMOOTHED_POINTS = 100
# Steps whose last ones differ by more than this factor count different things: epochs, iterations, Unix seconds.
KIND_RATIO = 50.0
# A metric of fewer points may have ended, or just begun.
MIN_KIND_POINTS = 3
# A metric of the validation of other programs is a curve of the best epochs, too, which is chosen by it.
SELECTION_KEYS = {"best_val_loss": "val_loss", "best_val_accuracy": "val_accuracy"}
# Metrics that are asked for several values in one epoch: 2,000 take 0.7 s.
MAX_ASKED_METRICS = 64


@dataclass(frozen=True)
class Extremes(Figures):
    """Also the number of points of a metric, and of those that are not finite. `step` is the highest one of a block if
    the points after it were dropped."""

    count: int = 0
    not_finite: int = 0


class Curves:
    """The curves of all metrics of a run, by name. One thread adds points, others may read.

    Of a training, the names are the keys of `engine.runs.metrics`. Comparisons and reports ask for the curves of any
    run by those keys, see `name_of`.
    """

    def __init__(self, num_logs: int = 1, max_columns: int = MAX_METRIC_COLUMNS) -> None:
        """A metric has at most `max_columns` points and blocks, of 88 bytes each."""
        self._lock = threading.Lock()
        self._metrics: dict[str, Blocks] = {}
        # A reading voids points of its own log only.
        self._names: list[list[str]] = [[] for _ in range(num_logs)]
        self._restarts: list[tuple[float, ...]] = [() for _ in range(num_logs)]
        self._step_axes: StepAxes | None = None
        self._has_epochs = False
        self._limit = self._max_columns = max_columns
        self._start_time = math.inf
        self._cache: tuple[int, dict[tuple[str, ...], Any]] = (-1, {})
        """A version, and what was asked for since."""
        self.version = 0
        """Changes with the points."""
        self.is_limited = False
        """Whether the run has more metrics than are kept."""
        self.num_points = 0
        """Number of points that were read, also those that were dropped."""

    def add(self, readings: Sequence[Reading]) -> None:
        """Add what a poll of each log has found."""
        with self._lock:
            for index, (names, reading) in enumerate(zip(self._names, readings, strict=True)):
                if (cut := reading.drop_from) is not None:
                    self._drop(names, cut)
                    kept = (step for step in self._restarts[index] if step < cut)
                    self._restarts[index] = (*kept, *reading.restarts)
            # A metric may move to another log, which voids the points of the one that had it.
            for names, reading in zip(self._names, readings, strict=True):
                if reading.points:
                    self._add(names, reading.points)
                if reading.axes is not None:
                    self.version += reading.axes != self._step_axes
                    self._step_axes, self._start_time = reading.axes, 0.0

    def _drop(self, names: list[str], step: float) -> None:
        self.version += 1
        for name in names:
            self._metrics[name].drop_from(step)
        if step == -math.inf:
            for name in names:
                del self._metrics[name]
            names.clear()
        if not any(metric.length for metric in self._metrics.values()):
            self._start_time = math.inf

    def _add(self, names: list[str], points: Points) -> None:
        if len(self._metrics) >= MAX_RUN_METRICS:
            self.is_limited = self.is_limited or not points.names <= self._metrics.keys()
            points = points.only(self._metrics.__contains__)
            if not points:
                return
        columns = points.columns()
        table = point_table(columns, first_number=self.num_points)
        if len(columns.names) > 1:
            table = table[:, np.argsort(columns.name_index, kind="stable")]
        ends = np.cumsum(np.bincount(columns.name_index, minlength=len(columns.names))).tolist()
        for name in columns.names:
            if name not in self._metrics:
                self._metrics[name] = Blocks()
                names.append(name)
        num_long = sum(metric.length > MIN_METRIC_COLUMNS for metric in self._metrics.values())
        left = max(MAX_COLUMNS, self._max_columns) - (len(self._metrics) - num_long) * MIN_METRIC_COLUMNS
        limit = min(max(left // max(num_long, 1), MIN_METRIC_COLUMNS), self._max_columns)
        if limit < self._limit:
            for metric in self._metrics.values():
                metric.shrink(limit)
            self._limit = limit
        for name, start, end in zip(columns.names, [0, *ends], ends, strict=False):
            self._metrics[name].add(table[:, start:end], self._limit)
        self.version += 1
        self.num_points += len(points)
        self._has_epochs = self._has_epochs or bool(np.isfinite(table[EPOCH]).any())
        if np.isfinite(table[TIME]).any():
            self._start_time = min(self._start_time, float(np.nanmin(table[TIME])))

    def _columns(self, name: str) -> FloatArray:
        """Return the columns of a metric, which do not change; none of an unknown one."""
        with self._lock:
            return self._metrics.get(name, _NO_METRIC).columns

    @property
    def names(self) -> list[str]:
        """Names of the metrics that have points."""
        with self._lock:
            return [name for name, metric in self._metrics.items() if metric.length]

    @property
    def restarts(self) -> list[int]:
        """The steps from which the run went on, after it had recorded them or later ones before."""
        with self._lock:
            return sorted({int(step) for steps in self._restarts for step in steps})

    @property
    def is_own(self) -> bool:
        """Whether these are the curves of a training, whose names are keys."""
        return self._step_axes is not None

    @property
    def axes(self) -> tuple[XAxis, ...]:
        """The x axes that the run has: the step, and what it recorded of epochs and times."""
        with self._lock:
            own = self._step_axes
            known = {"step": True, "hours": math.isfinite(self._start_time)}
            known["epoch"] = (
                own.steps_per_epoch > 0 if own is not None else self._has_epochs or self._epochs() is not None
            )
        order = X_AXES if own is not None else FOREIGN_AXES
        return tuple(axis for axis in order if known[axis])

    def extremes(self, name: str) -> Extremes:
        """Return the extremes of a metric; those of no points for an unknown one."""
        columns = self._columns(name)
        if not columns.size:
            return Extremes(None, None, None, None)
        count, num_finite = int(columns[SIZE].sum()), int(columns[FINITE].sum())
        low, high = float(np.fmin.reduce(columns[LOW])), float(np.fmax.reduce(columns[HIGH]))
        latest = np.argmax(columns[NUMBER])
        last, step = float(columns[LAST, latest]), int(columns[STEP_HIGH, latest])
        odd_step = None if math.isfinite(last) else int(columns[STEP_LOW, _first_of_last(columns[FINITE] == 0)])
        return Extremes(step, finite(last), finite(low), finite(high), odd_step, count, count - num_finite)

    def _cached(self, key: tuple[str, ...], make: Callable[[], Value]) -> Value:
        version, (known_version, cache) = self.version, self._cache
        if known_version != version:
            cache = {}
            self._cache = version, cache
        if key not in cache:
            cache[key] = make()
        value: Value = cache[key]
        return value

    def last_x(self, axis: XAxis) -> float:
        """Return the x position of the latest point of all metrics; 1 without one beyond 0."""
        return self._cached(("last_x", axis), lambda: self._last_x(axis))

    def _last_x(self, axis: XAxis) -> float:
        odd = self.odd_steps if axis == "step" else {}
        with self._lock:
            shown = [metric.columns for name, metric in self._metrics.items() if name not in odd]
        last = max((self._latest(columns, axis) for columns in shown), default=0.0)
        return last if last > 0 else 1.0

    @property
    def odd_steps(self) -> dict[str, tuple[float, float]]:
        """The first and the last step of each metric whose steps count something else than those of most points, such
        as epochs beside iterations: on one axis, one of them would have no width."""
        return self._cached(("odd_steps",), self._find_odd_steps)

    def _find_odd_steps(self) -> dict[str, tuple[float, float]]:
        if self.is_own:
            return {}
        with self._lock:
            known = {name: metric.columns for name, metric in self._metrics.items() if metric.length}
        limits = {name: (columns[STEP_LOW].min(), columns[STEP_HIGH].max()) for name, columns in known.items()}
        sizes = {name: float(columns[SIZE].sum()) for name, columns in known.items()}
        kinds, last = list[list[str]](), 0.0
        for name in sorted(limits, key=lambda name: limits[name][1]):
            if not kinds or limits[name][1] > KIND_RATIO * max(last, 1.0):
                kinds.append([])
            kinds[-1].append(name)
            last = limits[name][1]
        main = max(kinds, key=lambda names: sum(map(sizes.__getitem__, names)), default=[])
        above = {name for names in kinds[kinds.index(main) + 1 :] for name in names} if main else set()
        odd = {name for name in known if name not in main and (name in above or sizes[name] >= MIN_KIND_POINTS)}
        # Unix times are no steps that begin at 0.
        odd |= {name for name, (low, _) in limits.items() if low >= UNIX_TIMES[0]}
        return {name: (float(limits[name][0]), float(limits[name][1])) for name in odd}

    def odd_limits(self, names: Iterable[str], axis: XAxis) -> tuple[float, float] | None:
        """Return the limits of the x axis of metrics with `odd_steps`; None for all others."""
        limits = [self.odd_steps[name] for name in names if name in self.odd_steps] if axis == "step" else []
        low, high = min((low for low, _ in limits), default=0.0), max((high for _, high in limits), default=0.0)
        return (low if 2 * low > high else min(low, 0.0), max(high, low + 1.0)) if limits else None

    def _latest(self, columns: FloatArray, axis: XAxis) -> float:
        if not columns.size:
            return 0.0
        return finite(float(np.fmax.reduce(self._positions(columns, columns[STEP_HIGH], axis)))) or 0.0

    def over(self, name: str, axis: XAxis) -> BlockSeries:
        """Return the curve of a metric over an x axis, over steps if the run does not have it; an empty curve of an
        unknown metric."""
        return self._cached(("over", name, axis), lambda: self._over(name, axis if axis in self.axes else "step"))

    def _over(self, name: str, axis: XAxis) -> BlockSeries:
        columns = self._columns(name)
        with self._lock:
            x = self._positions(columns, (columns[STEP_LOW] + columns[STEP_HIGH]) / 2, axis)
            steps = next((self._restarts[index] for index, names in enumerate(self._names) if name in names), ())
        first = np.searchsorted(columns[STEP_HIGH], steps) if columns.size else np.empty(0, np.int64)
        restarts = x[first[(first > 0) & (first < len(x))]]
        if not (x[1:] >= x[:-1]).all() or not np.isfinite(x[-1:]).all():
            order = np.argsort(x, kind="stable")
            order = order[np.isfinite(x[order])]
            columns, x = columns[:, order], x[order]
        if not len(x):
            return NO_BLOCKS
        low, high, last = columns[LOW], columns[HIGH], columns[LAST]
        odd = x[columns[FINITE] < columns[SIZE]]
        if columns[SIZE].max() == 1:
            points = Series(x, last)
            return BlockSeries(points, points, odd, restarts)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = columns[SUM] / columns[FINITE]
        means[~np.isfinite(means)] = math.nan
        # The two points of a block follow the curve.
        is_rising = np.append(True, last[1:] >= last[:-1])
        pairs = np.where(is_rising, low, high), np.where(is_rising, high, low)
        return BlockSeries(Series(np.repeat(x, 2), np.stack(pairs, 1).reshape(-1)), Series(x, means), odd, restarts)

    def block_size(self, name: str) -> int:
        """Return the number of points in the largest block of a metric; 1 if every point is there."""
        return int(self._columns(name)[SIZE].max(initial=1))

    def _positions(self, columns: FloatArray, steps: FloatArray, axis: XAxis) -> FloatArray:
        """Return the positions of columns whose steps are `steps`."""
        if axis == "hours":
            hours: FloatArray = (columns[TIME] - self._start_time) / 3600
            return hours
        if self._step_axes is not None:
            return self._step_axes.positions(steps, axis)
        if axis == "step":
            return steps
        recorded: FloatArray = columns[EPOCH]
        if np.isnan(recorded).all() and (epochs := self._epochs()) is not None:
            recorded = np.interp(steps, *epochs)
        return recorded

    def _epochs(self) -> tuple[FloatArray, FloatArray] | None:
        """Return steps and their epochs, for metrics that were recorded without: of a metric that is the epoch, as the
        TensorBoard files of Lightning have it, else of the metric with the most epochs, which another log recorded."""
        named = [self._metrics[name].columns for name in EPOCH_NAMES if name in self._metrics]
        found = next(((columns[STEP_LOW], columns[LAST]) for columns in named if columns.size), None)
        if found is None and self._has_epochs:
            columns = max((metric.columns for metric in self._metrics.values()), key=_num_epochs)
            found = columns[STEP_LOW], columns[EPOCH]
        if found is None:
            return None
        steps, epochs = found
        order = np.argsort(steps, kind="stable")
        order = order[np.isfinite(epochs[order])]
        return (steps[order], epochs[order]) if len(order) else None

    @property
    def keys(self) -> dict[str, str]:
        """The key of each metric by its name, without that of the epoch."""
        return self._cached(("keys",), self._find_keys)

    def _find_keys(self) -> dict[str, str]:
        names = self.names
        return {name: name for name in names} if self.is_own else metric_keys(self.values(names))

    def values(self, names: Iterable[str]) -> dict[str, Extremes]:
        """Return the extremes of metrics."""
        return {name: self.extremes(name) for name in names}

    def name_of(self, key: str) -> str:
        """Return the name of the metric with a key; "" if the run has none."""
        names = self._cached(("names",), lambda: {known: name for name, known in self.keys.items()})
        return names.get(key) or names.get(SELECTION_KEYS.get(key, ""), "")

    def has(self, key: str) -> bool:
        """Whether the metric with a key has a finite value."""
        return self.extremes(self.name_of(key)).low is not None

    def is_long(self, key: str) -> bool:
        """Whether the curve of a key has enough points to be averaged over them."""
        return self.is_own or self.extremes(self.name_of(key)).count >= MIN_SMOOTHED_POINTS

    @property
    def own_names(self) -> list[str]:
        """The names of the metrics that are not in the registry."""
        return [key.removeprefix(METRIC_PREFIX) for key in self.keys.values() if key.startswith(METRIC_PREFIX)]

    def count_not_finite(self, names: Iterable[str]) -> int:
        """Return the number of values of metrics that are NaN or infinite."""
        return sum(self.extremes(name).not_finite for name in names)

    @property
    def repeats_epochs(self) -> bool:
        """Whether a metric has several values in one epoch, which would be above each other."""
        if self.is_own:
            return False
        longest = sorted(self.names, key=lambda name: -self._columns(name).shape[1])[:MAX_ASKED_METRICS]
        positions = (self.over(name, "epoch").means.x for name in longest if name in self.keys)
        return any(bool((np.diff(x) == 0).any()) for x in positions)

    def end_of_epoch(self, epoch: float | None, axis: XAxis) -> float | None:
        """Return the x position of the results of an epoch of a training; None if it has none."""
        columns = self._columns("val_loss")
        if epoch is None or not self.is_own or not columns.size:
            return None
        with self._lock:
            positions = self._positions(columns, columns[STEP_HIGH], axis)
        return next(map(float, positions[columns[EPOCH] >= epoch]), None)


_NO_METRIC = Blocks()


def default_axis(runs: Iterable[Curves]) -> XAxis:
    """Return epochs as the x axis if all runs have them, and not the same epoch for many steps; else steps."""
    return "epoch" if all("epoch" in run.axes and not run.repeats_epochs for run in runs) else "step"


def _first_of_last(is_true: NDArray[np.bool_]) -> int:
    """Return where the values that are true up to the last one begin; the last place if there is none."""
    others = np.flatnonzero(~is_true)
    return min(int(others[-1]) + 1 if len(others) else 0, len(is_true) - 1)


def _num_epochs(columns: FloatArray) -> int:
    return int(np.isfinite(columns[EPOCH]).sum())


class CurveReader:
    """Reads the curves of a run in slices, as long as somebody asks for more, and then what is appended."""

    def __init__(self, run: ForeignRun, max_columns: int = MAX_METRIC_COLUMNS) -> None:
        self.run = run
        self.curves = Curves(len(run.logs), max_columns)
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
        self._follower = RunFollower(run, renaming_of(run))
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
        if not self.curves.is_own:
            problems += restart_note(self.curves.restarts)
        if self.curves.is_limited:
            problems.append(f"only the first {MAX_RUN_METRICS:,} metrics are read")
        self.problems = tuple(dict.fromkeys(problems))
        before, self._read_bytes = self._read_bytes, [reading.read_bytes for reading in readings]
        total = sum(reading.total_bytes for reading in readings)
        self.share = min(sum(self._read_bytes) / total, 1.0) if total else 1.0
        self.has_more = self._read_bytes != before or any(reading.points for reading in readings)
        self._parameters = None if self.has_more else self._parameters
        return self.has_more
