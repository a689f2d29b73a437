"""Plots of curves as lines of text; `tui.screens.widgets.chart` shows them.

plotext draws the curves, each reduced to at most two points per column of Braille dots, because its run time grows with
the points. Axes and labels are drawn here, by the same mapping from values to characters: a label and the curve beside
it agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.base.ticks import log_ticks, tick_labels, ticks
from engine.runs.curves import BlockSeries
from engine.runs.series import FloatArray, Series, downsample_min_max, line_values, mask_nonpositive, smooth
from tui.charts.plotext_internals import skip_color_search
from tui.terminal.palette import MUTED, pale_style

# A Braille character is two dots wide.
DOTS_PER_COLUMN = 2
# Columns of a dash, and from one dash to the next.
DASH_COLUMNS, DASH_PERIOD = 2, 3
MIN_WIDTH, MIN_HEIGHT = 16, 3
# From this height, the labels of the x axis have a line of their own.
MIN_HEIGHT_OF_TWO_AXIS_LINES = 7
POINT, STAR, ODD, RESTART = "•", "★", "×", "↻"
# Columns from one letter of a curve to the next.
MARK_COLUMNS = 24
MAX_Y_TICKS, MIN_ROWS_PER_TICK = 8, 2.2
X_TICK_COLUMNS = 7
# Of 30 KB each on a large terminal. The screen of a run has ten curves, that of eight compared runs 64.
MAX_CACHED_CURVES = 128
# A thousandth of a dot of the largest terminals.
POSITION_DECIMALS = 7
# Half an epoch is shown only where the window is smaller.
WHOLE_AXES = ("epoch", "step")
# An axis begins at zero if at most this share of it lies below the values.
MAX_SHARE_BELOW = 0.15
# Padding a larger limit would overflow to infinity.
MAX_AXIS_LIMIT = 1e307
# Outliers are off scale if they stretch the axis to more than twice the range of the other points.
PERCENTILES, MAX_STRETCH, SAMPLED_POINTS = (1, 99), 2.0, 1000


@dataclass(frozen=True)
class Curve:
    """A named curve; `style` is one of `SERIES`. A star marks the point at `star_x`, and the letter `mark` several
    points of the curve."""

    label: str
    blocks: BlockSeries
    style: str
    is_dashed: bool = False
    star_x: float | None = None
    mark: str = ""
    latest: float | None = None
    """What lists and log show as its latest value, if that is no mean of a block of steps."""

    @property
    def series(self) -> Series:
        """The points of the curve, or the extremes of its blocks."""
        return self.blocks.points

    @property
    def values(self) -> Series:
        """The points of the curve, or the means of its blocks: what smoothing averages, and the legend shows."""
        return self.blocks.means


@dataclass(frozen=True)
class PlotWindow:
    """The visible part of the x axis, from `low` to `high`, and how the curves are drawn in it."""

    low: float
    high: float
    log: bool = False
    smoothing: float = 0.0
    """Share of the points in the window that the moving average covers; 0 disables smoothing."""
    x_name: str = ""
    """Name of the x axis, at its right end."""
    with_raw: bool = True
    """Whether a pale curve of all points is behind a smoothed one."""
    whole: bool = False
    """Whether the y axis has room for all points, also for outliers."""
    x_ticks: Sequence[tuple[float, str]] = ()
    """Positions on the x axis and their labels, in place of round numbers."""


Piece = tuple[str, str]
"""A stretch of a line and the name of its style."""


@dataclass(frozen=True)
class Plot:
    """A drawn plot. The x axis starts at column `area_left` and is `area_width` columns long; 0 without curves. The
    last `axis_lines` rows are the x axis."""

    rows: list[list[Piece]]
    area_left: int = 0
    area_width: int = 0
    axis_lines: int = 0
    off_scale: tuple[int, int] = (0, 0)
    """Number of curves with points above and below the y axis, which are drawn at its ends."""


def plot(curves: Sequence[Curve], window: PlotWindow, width: int, height: int) -> Plot:
    """Plot the curves as `height` lines of `width` columns, or return one line that says why nothing is drawn."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return Plot([[("Too small to draw", MUTED)]])
    visible = [_visible(curve, window) for curve in curves]
    if (limits := _y_limits(visible, window)) is None:
        return Plot([[(_empty_message(visible, window.log), MUTED)]])
    return _draw(visible, window, limits, width, height)


def _y_limits(visible: Sequence[_Visible], window: PlotWindow) -> tuple[float, float] | None:
    """Return the limits of the points in the window without outliers; None without points."""
    ends = [limit for part in visible for limit in part.shown.y_limits() or ()]
    if not ends:
        return None
    limits = min(ends), max(ends)
    if window.whole:
        return limits
    sample = np.concatenate([part.shown.y[:: len(part.shown.y) // SAMPLED_POINTS + 1] for part in visible])
    ys = np.concatenate([limits, sample[np.isfinite(sample)]])
    # Half of each: the difference of huge values overflows.
    scaled = np.log10(ys) if window.log else ys / 2
    first, last = np.percentile(scaled, PERCENTILES)
    if not scaled[1] - scaled[0] > MAX_STRETCH * (last - first) > 0:
        return limits
    return (10.0**first, 10.0**last) if window.log else (2 * first, 2 * last)


def _pad_limits(low: float, high: float, log: bool) -> tuple[float, float]:
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


class _Visible(NamedTuple):
    """What a window shows of a curve. `drawn` is smoothed over the pale `shown` points, else the same object."""

    curve: Curve
    shown: Series
    drawn: Series


def _visible(curve: Curve, window: PlotWindow) -> _Visible:
    points, values = (series.between(window.low, window.high) for series in (curve.series, curve.values))
    if window.log:
        points, values = mask_nonpositive(points), mask_nonpositive(values)
    if not window.smoothing or curve.is_dashed or len(points.y) <= 2:
        return _Visible(curve, points, points)
    drawn = smooth(values, window.smoothing)
    return _Visible(curve, points if window.with_raw else drawn, drawn)


def _empty_message(visible: Sequence[_Visible], log: bool) -> str:
    if any(len(part.shown.y) for part in visible):
        return "No positive value for the log scale" if log else "No finite value"
    return "No data yet"


def _draw(
    visible: Sequence[_Visible], window: PlotWindow, limits: tuple[float, float], width: int, height: int
) -> Plot:
    y_limits = _pad_limits(*limits, window.log)
    axis_lines = 2 if height >= MIN_HEIGHT_OF_TWO_AXIS_LINES else 1
    rows = height - axis_lines
    max_ticks = max(min(int(rows / MIN_ROWS_PER_TICK) + 1, MAX_Y_TICKS), 2)
    y_ticks = (log_ticks if window.log else ticks)(*y_limits, max_ticks)
    y_labels = tick_labels(y_ticks, log=window.log)
    left = max(map(len, y_labels), default=0) + 1
    canvas = _Canvas(width - left, rows, window, y_limits)
    for curve, shown, drawn in visible:
        if shown is not drawn:
            canvas.draw(shown, pale_style(curve.style))
        canvas.draw(drawn, curve.style, is_dashed=curve.is_dashed)
    for curve, _, _ in visible:
        canvas.draw_below(curve.blocks.restarts, RESTART, curve.style)
        canvas.draw_below(curve.blocks.odd, ODD, curve.style)
    marked = [part for part in visible if part.curve.mark]
    for index, (curve, _, drawn) in enumerate(marked):
        for column in mark_columns(index, len(marked), width - left):
            canvas.draw_mark(drawn, column, curve.mark, curve.style)
    for curve, shown, _ in visible:
        if curve.star_x is not None and window.low <= curve.star_x <= window.high:
            canvas.draw_star(shown, curve.star_x, curve.style)
    labels = {canvas.row_of(tick): label for tick, label in zip(y_ticks, y_labels, strict=True)}
    drawn_rows = []
    for row, pieces in enumerate(canvas.rows()):
        label = labels.get(row, "").rjust(left - 1) + ("┤" if row in labels else "│")
        drawn_rows.append([(label, MUTED), *pieces])
    ranges = [part.shown.y_limits() or y_limits for part in visible]
    off_scale = sum(high > y_limits[1] for _, high in ranges), sum(low < y_limits[0] for low, _ in ranges)
    rows_of_axis = _x_axis(window, left, width, axis_lines)
    return Plot([*drawn_rows, *rows_of_axis], left, width - left, axis_lines, off_scale)


def mark_columns(index: int, marks: int, columns: int) -> range:
    """Return the columns in which curve `index` of `marks` has its letter, no column for two curves."""
    stride = max(MARK_COLUMNS, 2 * marks)
    return range((2 * index + 1) * stride // (2 * marks), columns, stride)


class _Canvas:
    """A grid of `columns` x `rows` characters. Where curves meet, a character shows the one that was drawn last.

    Limits are at the centers of the first and the last character, as plotext has them. plotext receives finite values
    only, because a NaN ends the process (plotext 6.1), and positions from 0 to 1, which no scale overflows. Its figure
    is global, so draw from one thread only.
    """

    def __init__(self, columns: int, rows: int, window: PlotWindow, y_limits: tuple[float, float]) -> None:
        self._columns, self._rows, self._window = columns, rows, window
        self._low, self._high = (math.log10(y) if window.log else y for y in y_limits)
        self._characters = np.full((rows, columns), " ")
        self._styles = np.zeros((rows, columns), np.int64)
        self._style_names = [""]

    def _x_positions(self, x: FloatArray | float) -> FloatArray:
        """Return positions from 0 to 1, of points beside the window beyond them."""
        window = self._window
        return np.asarray((np.asarray(x) - window.low) / max(window.high - window.low, 1e-300))

    def _y_positions(self, y: FloatArray | float) -> FloatArray:
        # Outliers are at the ends of the axis.
        scaled = np.clip(np.log10(y) if self._window.log else np.asarray(y), self._low, self._high)
        # Divided first: the difference of huge limits overflows.
        return np.asarray((scaled / 2 - self._low / 2) / (self._high / 2 - self._low / 2))

    def row_of(self, y: float) -> int:
        """Return the row of characters of a value, counted from the top."""
        # Between two rows, plotext takes the upper one.
        return math.ceil((1 - float(self._y_positions(y))) * (self._rows - 1) - 0.5 - 1e-9)

    def draw(self, series: Series, style: str, *, is_dashed: bool = False) -> None:
        """Draw a curve, or a point where a value has no neighbors."""
        pieces = downsample_min_max(series, self._window.low, self._window.high, self._columns * DOTS_PER_COLUMN)
        points = tuple(_cache_key(self._x_positions(piece.x), self._y_positions(piece.y)) for piece in pieces)
        drawn = draw_curve(self._columns, self._rows, points)
        mask = drawn != " "
        if is_dashed:
            mask &= (np.arange(self._columns) % DASH_PERIOD < DASH_COLUMNS) | (drawn == POINT)
        self._characters[mask] = drawn[mask]
        self._styles[mask] = self._style_number(style)

    def draw_mark(self, series: Series, column: int, mark: str, style: str) -> None:
        """Draw a letter on a curve, if the curve has a value in this column."""
        x = self._window.low + column / max(self._columns - 1, 1) * (self._window.high - self._window.low)
        y = float(line_values(series, np.array([x]))[0])
        if math.isfinite(y) and 0 <= (row := self.row_of(y)) < self._rows:
            self._characters[row, column], self._styles[row, column] = mark, self._style_number(style)

    def draw_below(self, x: FloatArray, mark: str, style: str) -> None:
        """Mark positions at the lower edge."""
        columns = np.floor(self._x_positions(x) * (self._columns - 1) + 0.5)
        columns = columns[(columns >= 0) & (columns < self._columns)].astype(np.int64)
        self._characters[-1, columns], self._styles[-1, columns] = mark, self._style_number(style)

    def draw_star(self, series: Series, x: float, style: str) -> None:
        """Mark the point of a curve that is nearest to `x`."""
        if (y := series.value_at(x)) is not None:
            row, column = self.row_of(y), math.floor(float(self._x_positions(x)) * (self._columns - 1) + 0.5)
            self._characters[row, column], self._styles[row, column] = STAR, self._style_number(style)

    def _style_number(self, style: str) -> int:
        self._style_names.append(style)
        return len(self._style_names) - 1

    def rows(self) -> Iterator[list[Piece]]:
        """Yield the pieces of each row."""
        lines = self._characters.view(f"<U{self._columns}")[:, 0].tolist()
        changes = np.diff(self._styles, axis=1) != 0
        for line, styles, changed in zip(lines, self._styles, changes, strict=True):
            edges = [0, *(np.flatnonzero(changed) + 1).tolist(), self._columns]
            yield [(line[first:last], self._style_names[styles[first]]) for first, last in pairwise(edges)]


def _cache_key(x: FloatArray, y: FloatArray) -> tuple[bytes, bytes]:
    """Return the positions of a stretch, rounded: a curve is the same on each x axis, but for the last digits."""
    return np.round(x, POSITION_DECIMALS).tobytes(), np.round(y, POSITION_DECIMALS).tobytes()


@lru_cache(MAX_CACHED_CURVES)
def draw_curve(columns: int, rows: int, pieces: tuple[tuple[bytes, bytes], ...]) -> NDArray[np.str_]:
    """Return the characters of a curve, shape (rows, columns).

    `pieces` are the x and y positions from 0 to 1 of its stretches. They are the key of the cache, because the arrays
    of a live run grow in place.
    """
    figure = _figure()
    figure.clear.data()
    figure.plot_size(columns, rows)
    for x_bytes, y_bytes in pieces:
        x, y = np.frombuffer(x_bytes), np.frombuffer(y_bytes)
        is_line = len(x) > 1
        signal = figure.signal(x.tolist(), y.tolist(), marker=_marker("braille" if is_line else POINT))
        skip_color_search(signal)
        figure.draw(signal.lines(is_line))
    text = figure.build().string(colorless=True).replace("\n", "")
    return np.frombuffer(text.encode("utf-32-le"), "<U1").reshape(rows, columns)


@lru_cache
def _marker(name: str) -> Any:
    """Return a marker that is never copied.

    plotext 6.1 copies the marker for each point, which takes a sixth of the time of a curve.
    """
    import plotext

    class SharedMarker(plotext.marker):  # type: ignore[misc]
        def __copy__(self) -> SharedMarker:
            return self

    return SharedMarker(name)


@lru_cache
def _figure() -> Any:
    """Return plotext's only figure, with both axes from 0 to 1."""
    import plotext

    # Otherwise it is no larger than the terminal was when plotext was imported.
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.legend(False)
    figure.axes(False)
    for axis in (0, 1):
        figure.ruler(axis, 0).lim(0.0, 1.0)
        figure.ruler(axis, 0).ticks([], [])
    return figure


def _x_axis(window: PlotWindow, left: int, width: int, axis_lines: int) -> list[list[Piece]]:
    """Return the axis line and its labels, in one line or two. The name of the axis is at the right end."""
    columns = width - left
    max_ticks = max(columns // X_TICK_COLUMNS, 2)
    values = ticks(window.low, window.high, max_ticks, whole=window.x_name in WHOLE_AXES)
    labeled = window.x_ticks or list(zip(values, tick_labels(values), strict=True))
    rule, labels = ["─"] * columns, [" "] * (width + 1)
    name = f" {window.x_name}" if window.x_name else ""
    end = width - len(name)
    labels[end:] = name
    free_from = left if axis_lines == 1 else 0
    for value, label in labeled:
        column = round((value - window.low) / max(window.high - window.low, 1e-300) * (columns - 1))
        rule[column] = "┬"
        start = min(max(left + column - (len(label) - 1) // 2, free_from), width - len(label))
        if free_from <= start and start + len(label) <= end:
            labels[start : start + len(label)] = label
            free_from = start + len(label) + 1
    label_line = "".join(labels[:width])
    if axis_lines == 1:
        filled = [mark if label == " " else label for mark, label in zip(rule, label_line[left:], strict=True)]
        lines = [" " * (left - 1) + "└" + "".join(filled)]
    else:
        lines = [" " * (left - 1) + "└" + "".join(rule), label_line]
    return [[(line, MUTED)] for line in lines]
