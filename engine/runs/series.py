"""Series of points: downsampling to the columns of a window, blocks, smoothing, and the mean of several series.

`engine.runs.curves` keeps those of a run in blocks; the charts of the screen and `engine.report` draw them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.base.codec import finite
from engine.watch.points import PointColumns

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_GROUP_POINTS = 2048


@dataclass(frozen=True)
class Series:
    """Points of a curve, sorted by `x`. `y` is finite, or NaN for a gap. Both have shape (points,)."""

    x: FloatArray
    y: FloatArray

    def between(self, low: float, high: float) -> Series:
        """Return the points from `low` to `high` and one more on each side, so that lines extend to the edges."""
        first = max(int(np.searchsorted(self.x, low, "left")) - 1, 0)
        last = int(np.searchsorted(self.x, high, "right")) + 1
        return Series(self.x[first:last], self.y[first:last])

    def y_limits(self) -> tuple[float, float] | None:
        """Return the minimum and maximum; None without a finite value."""
        if len(self.y) == 0:
            return None
        # fmin and fmax ignore NaN unless all values are NaN.
        low, high = float(np.fmin.reduce(self.y)), float(np.fmax.reduce(self.y))
        return (low, high) if math.isfinite(low) else None

    def latest(self) -> float | None:
        """Return the last value; None if it is NaN or the series is empty."""
        return finite(float(self.y[-1])) if len(self.y) else None

    def value_at(self, x: float) -> float | None:
        """Return the value of the point nearest to `x`; None if it is NaN or the series is empty."""
        if len(self.x) == 0:
            return None
        right = min(int(np.searchsorted(self.x, x)), len(self.x) - 1)
        left = max(right - 1, 0)
        nearest = left if abs(self.x[left] - x) <= abs(self.x[right] - x) else right
        return finite(float(self.y[nearest]))


def line_values(series: Series, x: FloatArray) -> FloatArray:
    """Return the values at `x` of the line through the finite points; NaN beyond its ends."""
    finite = np.isfinite(series.y)
    if not finite.any():
        return np.full(len(x), np.nan)
    return np.interp(x, series.x[finite], series.y[finite], np.nan, np.nan)


def mask_nonpositive(series: Series) -> Series:
    """Replace values that a logarithmic axis cannot show (zero and below) by NaN."""
    limits = series.y_limits()
    return series if limits is None or limits[0] > 0 else Series(series.x, np.where(series.y > 0, series.y, np.nan))


def downsample_min_max(series: Series, low: float, high: float, columns: int) -> list[Series]:
    """Reduce a series to the minimum and maximum of each of `columns` columns from `low` to `high`.

    Keeps every spike visible with at most two points per column, in an order that follows the curve. Returns one series
    per stretch between gaps; a column whose points are all NaN is a gap.
    """
    x, y = series.x, series.y
    if len(x) == 0 or high <= low:
        return []
    if len(x) <= 2 * columns:
        return _split_at_gaps(x, y)
    width = (high - low) / columns
    edges = np.searchsorted(x, low + width * np.arange(columns + 1))
    edges[0], edges[-1] = 0, len(x)
    reduced = block_extremes(series, edges[:-1][np.diff(edges) > 0])
    return _split_at_gaps(reduced.x, reduced.y)


def block_extremes(series: Series, starts: IntArray) -> Series:
    """Return minimum and maximum of each block, in an order that follows the curve; NaN values are ignored.

    `starts` has the index of the first point of each block.
    """
    x, y = series.x, series.y
    ends = np.append(starts[1:], len(x)) - 1
    minima, maxima = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    rising = y[starts] <= y[ends]
    first, second = np.where(rising, minima, maxima), np.where(rising, maxima, minima)
    return Series(np.repeat((x[starts] + x[ends]) / 2, 2), np.stack([first, second], 1).reshape(-1))


def block_means(series: Series, starts: IntArray) -> tuple[Series, FloatArray]:
    """Return the mean of the finite values of each block, NaN without any, and their number."""
    x, y = series.x, series.y
    sums, counts = np.add.reduceat(y, starts), np.diff(starts, append=len(y)).astype(np.float64)
    if np.isnan(sums).any():
        finite = np.isfinite(y)
        sums = np.add.reduceat(np.where(finite, y, 0.0), starts)
        counts = np.add.reduceat(finite.astype(np.float64), starts)
    means = np.where(counts > 0, sums / np.maximum(counts, 1.0), np.nan)
    return Series((x[starts] + x[np.append(starts[1:], len(x)) - 1]) / 2, means), counts


def _split_at_gaps(x: FloatArray, y: FloatArray) -> list[Series]:
    """Split at NaN; returns the stretches of finite values."""
    finite = np.isfinite(y)
    if finite.all():
        return [Series(x, y)]
    edges = np.flatnonzero(np.diff(finite.astype(np.int8))) + 1
    parts = zip(np.split(x, edges), np.split(y, edges), np.split(finite, edges), strict=True)
    return [Series(part_x, part_y) for part_x, part_y, is_finite in parts if is_finite[0]]


# Longer series are averaged in blocks to this many points before they are smoothed.
MAX_SMOOTHED_POINTS = 2048


def block_starts(points: int, max_blocks: int) -> IntArray:
    """Return the first index of each block when `points` are split into blocks of nearly equal size."""
    if points <= max_blocks:
        return np.arange(points)
    return np.linspace(0, points, max_blocks, endpoint=False).astype(np.int64)


def smooth(series: Series, window_share: float) -> Series:
    """Smooth with a centered moving average over `window_share` of the points; NaN values are ignored."""
    starts = block_starts(len(series.x), MAX_SMOOTHED_POINTS)
    if len(starts) < 3:
        return series
    blocks, counts = block_means(series, starts)
    sums = np.where(counts > 0, blocks.y, 0.0) * counts
    half = max(int(len(starts) * window_share / 2), 1)
    index = np.arange(len(starts))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(starts))
    all_sums, all_counts = np.append(0.0, np.cumsum(sums)), np.append(0.0, np.cumsum(counts))
    window_counts = all_counts[high] - all_counts[low]
    means = np.where(window_counts > 0, (all_sums[high] - all_sums[low]) / np.maximum(window_counts, 1.0), np.nan)
    return Series(blocks.x, means)


def mean_and_spread(series: Sequence[Series]) -> tuple[Series, tuple[Series, Series]]:
    """Return the mean of several curves, and the mean minus and plus their sample standard deviation (n - 1).

    At each position, they are those of the runs that have got so far. Where only one has, there is no spread.
    """
    x = _common_positions(series)
    values = np.array([line_values(part, x) for part in series])
    known = np.isfinite(values)
    count = known.sum(0)
    mean = np.where(count > 0, np.where(known, values, 0.0).sum(0) / np.maximum(count, 1), np.nan)
    squares = np.where(known, values - mean, 0.0) ** 2
    deviation = np.where(count > 1, np.sqrt(squares.sum(0) / np.maximum(count - 1, 1)), np.nan)
    return Series(x, mean), (Series(x, mean - deviation), Series(x, mean + deviation))


def _common_positions(series: Sequence[Series]) -> FloatArray:
    """Return the positions of all points, or evenly spaced ones if there are too many."""
    positions = np.unique(np.concatenate([part.x for part in series]))
    if len(positions) <= MAX_GROUP_POINTS:
        return positions
    return np.linspace(positions[0], positions[-1], MAX_GROUP_POINTS)


@dataclass(frozen=True, eq=False)
class BlockSeries:
    """A curve over an x axis. `points` has the extremes of each block, `means` the mean; the same object without
    blocks. `odd` has the x positions of the points and blocks with a value that was NaN or infinite, and `restarts`
    those where the run went on from an earlier step."""

    points: Series
    means: Series
    odd: FloatArray = field(default_factory=lambda: np.empty(0))
    restarts: FloatArray = field(default_factory=lambda: np.empty(0))


_NO_SERIES = Series(np.empty(0), np.empty(0))
NO_BLOCKS = BlockSeries(_NO_SERIES, _NO_SERIES)


# Rows of a metric's table. A column is a point, or a block of consecutive points. Rows with the same reduction are
# adjacent: the first value of the block, the last one, the sum, the minimum, the maximum.
EPOCH, TIME, LAST, NUMBER, SUM, FINITE, SIZE, STEP_LOW, LOW, STEP_HIGH, HIGH = range(11)
"""Epoch and time; value, and number in the order of reading; sum and number of the finite values, and number of points;
lowest step and value; highest step and value."""
_OF_FIRST, _OF_LAST, _ADDED = slice(EPOCH, LAST), slice(LAST, SUM), slice(SUM, STEP_LOW)
_LOWEST, _HIGHEST = slice(STEP_LOW, STEP_HIGH), slice(STEP_HIGH, HIGH + 1)
_NUM_ROWS = 11
FIRST_COLUMNS = 32


class Blocks:
    """The points of one metric. What `columns` returned once does not change."""

    def __init__(self) -> None:
        self._columns: FloatArray = np.empty((_NUM_ROWS, FIRST_COLUMNS))
        self.length = 0

    @property
    def columns(self) -> FloatArray:
        return self._columns[:, : self.length]

    def add(self, points: FloatArray, limit: int) -> None:
        """Add points as columns. Beyond `limit` columns, all but the last point are put together in blocks."""
        start, self.length = self.length, self.length + points.shape[1]
        if self.length > self._columns.shape[1]:
            grown = np.empty((_NUM_ROWS, max(self.length, min(2 * self._columns.shape[1], limit))))
            grown[:, :start] = self._columns[:, :start]
            self._columns = grown
        self._columns[:, start : self.length] = points
        self.shrink(limit)

    def shrink(self, limit: int) -> None:
        """Keep at most about `limit` columns."""
        if self.length > limit:
            self._reduce(limit // 2)
        elif self._columns.shape[1] > limit:
            self._columns = self.columns.copy()

    def _reduce(self, max_blocks: int) -> None:
        """Put columns together: at most `max_blocks`, and two for the last point.

        Blocks of 2**n points are halved in number when n grows.
        """
        columns = self.columns
        size = columns[SIZE]
        block_size = 2.0 ** math.ceil(math.log2(max(size.sum() / max_blocks, 1)))
        blocks = (np.cumsum(size) - size) // block_size
        is_start = np.append(True, np.diff(blocks) != 0)
        # The last value stays exact where the curve ends.
        last = int(np.argmax(columns[NUMBER]))
        is_start[last : last + 2] = True
        starts = np.flatnonzero(is_start)
        ends = np.append(starts[1:], len(size)) - 1
        groups = (
            columns[_OF_FIRST, starts],
            columns[_OF_LAST, ends],
            np.add.reduceat(columns[_ADDED], starts, axis=1),
            # fmin and fmax ignore NaN unless all values are NaN.
            np.fmin.reduceat(columns[_LOWEST], starts, axis=1),
            np.fmax.reduceat(columns[_HIGHEST], starts, axis=1),
        )
        self._columns, self.length = np.concatenate(groups), len(starts)

    def drop_from(self, step: float) -> None:
        """Forget the points from a step on, with the block that this step is in."""
        self._columns = self.columns[:, self.columns[STEP_HIGH] < step]
        self.length = self._columns.shape[1]


def point_table(points: PointColumns, *, first_number: int) -> FloatArray:
    """Return a column for each point. A value that is not finite becomes NaN."""
    table = np.empty((_NUM_ROWS, len(points)))
    table[STEP_LOW] = table[STEP_HIGH] = points.steps
    table[EPOCH], table[TIME] = points.epochs, points.times
    is_finite = np.isfinite(points.values)
    values = np.where(is_finite, points.values, math.nan)
    table[LOW] = table[HIGH] = table[LAST] = values
    table[FINITE], table[SUM] = is_finite, np.where(is_finite, values, 0.0)
    table[SIZE], table[NUMBER] = 1.0, first_number + np.arange(len(points))
    return table
