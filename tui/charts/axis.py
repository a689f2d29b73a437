"""Series of points for the charts: downsampling to the columns of a window, smoothing, axis ticks and limits.

`tui.charts.plot` and `tui.charts.export` draw the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# An axis begins at zero if at most this share of it lies below the values.
MAX_SHARE_BELOW = 0.15
# Padding a larger limit would overflow to infinity.
MAX_AXIS_LIMIT = 1e307


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
        value = float(self.y[-1]) if len(self.y) else math.nan
        return value if math.isfinite(value) else None

    def value_at(self, x: float) -> float | None:
        """Return the value of the point nearest to `x`; None if it is NaN or the series is empty."""
        if len(self.x) == 0:
            return None
        right = min(int(np.searchsorted(self.x, x)), len(self.x) - 1)
        left = max(right - 1, 0)
        nearest = left if abs(self.x[left] - x) <= abs(self.x[right] - x) else right
        value = float(self.y[nearest])
        return value if math.isfinite(value) else None


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


def ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten.

    Returns at most `max_ticks` numbers if that is at least 2.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / max(max_ticks - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    sizes = [size * power for size in (0.2, 0.5, 1, 2, 5, 10)]
    first_fit = next(index for index, size in enumerate(sizes) if size >= rough * (1 - 1e-9))
    tick_values: list[float] = []
    # If the largest step yields fewer than two ticks, try the next smaller ones.
    for step in reversed(sizes[: first_fit + 1]):
        tick_values = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        if len(tick_values) >= min(max_ticks, 2):
            break
    return tick_values


def log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return the powers of ten between two positive numbers; round numbers if there are fewer than two powers."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        return [tick for tick in ticks(low, high, max_ticks) if tick > 0]
    stride = max(1, math.ceil((last - first + 1) / max(max_ticks, 1)))
    return [10.0**power for power in range(first, last + 1, stride)]


# Numbers that need more decimals have an exponent.
MAX_TICK_DECIMALS = 4


def tick_labels(values: list[float], *, log: bool = False) -> list[str]:
    """Format numbers with as few digits as needed to keep them distinct and accurate, with aligned decimals unless they
    are the ticks of a logarithmic axis."""
    if not log and all(abs(value) < 1e6 for value in values):
        for decimals in range(MAX_TICK_DECIMALS + 1):
            labels = [f"{value:.{decimals}f}" for value in values]
            if _are_accurate(labels, values):
                # A tick of a tiny negative number is zero.
                return [label.removeprefix("-") if float(label) == 0 else label for label in labels]
    for digits in range(1, 8):
        labels = [format_number(value, digits) for value in values]
        if _are_accurate(labels, values):
            return labels
    return [f"{value:g}" for value in values]


def _are_accurate(labels: list[str], values: list[float]) -> bool:
    return len(set(labels)) == len(values) and all(
        math.isclose(float(label), value, rel_tol=1e-3, abs_tol=1e-12)
        for label, value in zip(labels, values, strict=True)
    )


def format_number(value: float, digits: int = 4) -> str:
    """Format with `digits` significant digits; whole numbers below a million in full."""
    if abs(value) < 1e6 and value == int(value):
        return str(int(value))
    text = f"{value:.{digits}g}"
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else mantissa


def pad_limits(low: float, high: float, log: bool) -> tuple[float, float]:
    """Widen the limits of an axis by 5% on each side; a single value gets some room, too.

    An axis of positive values that come near zero begins at zero.
    """
    if log:
        span = math.log10(high) - math.log10(low)
        margin = 0.05 * span if span > 0 else 0.5
        return 10 ** max(math.log10(low) - margin, -307.0), 10 ** min(math.log10(high) + margin, 308.0)
    low, high = max(low, -MAX_AXIS_LIMIT), min(high, MAX_AXIS_LIMIT)
    margin = 0.05 * (high - low) if high > low else abs(low) * 0.1 or 0.5
    if 0 <= low < MAX_SHARE_BELOW * high:
        return 0.0, high + margin
    return low - margin, high + margin
