"""Plots of curves as lines of text in Braille characters; `tui.widgets.chart` shows them.

A curve is reduced to the columns of Braille dots, so the run time depends on the size of the plot, not on the number
of points. Limits, ticks and curves share one mapping from values to dots, so a label and the curve beside it agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from tui.charts.axis import (
    Series,
    downsample_min_max,
    log_ticks,
    mask_nonpositive,
    pad_limits,
    smooth,
    tick_labels,
    ticks,
)
from tui.palette import MUTED, pale_style

DOTS_PER_COLUMN, DOTS_PER_ROW = 2, 4
BLANK_BRAILLE = 0x2800
# Bits of the dots of a Braille character, of shape (rows, columns) (Unicode 15, section 21.1).
DOT_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], np.int64)
# Columns of dots that a dash and the gap after it take.
DASH_PERIOD, DASH_LENGTH = 6, 4
MIN_WIDTH, MIN_HEIGHT = 16, 3
# From this height, the labels of the x axis have a line of their own.
MIN_HEIGHT_OF_TWO_AXIS_LINES = 7
POINT, STAR = "•", "★"
MAX_Y_TICKS, MIN_ROWS_PER_TICK = 8, 1.8
X_TICK_COLUMNS = 7
LINE_MARKERS = ("braille", "dashed")

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Curve:
    """A named series. `marker` is "braille" for a line, "dashed", or a character for points; `style` is one of
    `SERIES`. A star marks the point at `star_x`."""

    label: str
    series: Series
    marker: str
    style: str
    star_x: float | None = None


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


@dataclass(frozen=True)
class Plot:
    """A drawn plot. The x axis starts at column `area_left` and is `area_width` columns long; 0 without curves. The
    last `axis_lines` lines are the x axis."""

    lines: list[Text]
    area_left: int = 0
    area_width: int = 0
    axis_lines: int = 0


def plot(curves: Sequence[Curve], window: PlotWindow, width: int, height: int) -> Plot:
    """Plot the curves as `height` lines of `width` columns, or return one line that says why nothing is drawn."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return Plot([Text("Too small to draw", MUTED)])
    visible = [(curve, curve.series.between(window.low, window.high)) for curve in curves]
    if window.log:
        visible = [(curve, mask_nonpositive(series)) for curve, series in visible]
    ys = [limit for _, series in visible for limit in series.y_limits() or ()]
    if not ys:
        return Plot([Text(_empty_message(visible, window.log), MUTED)])
    return _draw(visible, window, pad_limits(min(ys), max(ys), window.log), width, height)


def _empty_message(visible: Sequence[tuple[Curve, Series]], log: bool) -> str:
    if any(len(series.y) for _, series in visible):
        return "No positive value for the log scale" if log else "No finite value"
    return "No data yet"


def _draw(
    visible: Sequence[tuple[Curve, Series]], window: PlotWindow, y_limits: tuple[float, float], width: int, height: int
) -> Plot:
    axis_lines = 2 if height >= MIN_HEIGHT_OF_TWO_AXIS_LINES else 1
    rows = height - axis_lines
    max_ticks = max(min(int(rows / MIN_ROWS_PER_TICK) + 1, MAX_Y_TICKS), 2)
    y_ticks = (log_ticks if window.log else ticks)(*y_limits, max_ticks)
    y_labels = tick_labels(y_ticks, log=window.log)
    left = max(map(len, y_labels), default=0) + 1
    canvas = _Canvas(width - left, rows, window, y_limits)
    for curve, series in visible:
        if window.smoothing and curve.marker == "braille" and len(series.y) > 2:
            canvas.draw(series, curve.marker, pale_style(curve.style))
            series = smooth(series, window.smoothing)
        canvas.draw(series, curve.marker, curve.style)
    for curve, series in visible:
        if curve.star_x is not None and window.low <= curve.star_x <= window.high:
            canvas.draw_star(series, curve.star_x, curve.style)
    labels = {int(canvas.dot_rows(tick)) // DOTS_PER_ROW: label for tick, label in zip(y_ticks, y_labels, strict=True)}
    lines = []
    for row in range(rows):
        line = Text(labels.get(row, "").rjust(left - 1), MUTED, no_wrap=True, end="")
        line = Text.assemble(line, ("┤" if row in labels else "│", MUTED), no_wrap=True, end="")
        for text, style in canvas.row(row):
            line.append(text, style)
        lines.append(line)
    return Plot([*lines, *_x_axis(window, left, width, axis_lines)], left, width - left, axis_lines)


class _Canvas:
    """A grid of `columns` x `rows` characters. Where curves meet, a character shows the one that was drawn last."""

    def __init__(self, columns: int, rows: int, window: PlotWindow, y_limits: tuple[float, float]) -> None:
        self._columns, self._rows, self._window = columns, rows, window
        self._low, self._high = (math.log10(y) if window.log else y for y in y_limits)
        self._characters = np.full((rows, columns), " ")
        self._styles = np.zeros((rows, columns), np.int64)
        self._style_names = [""]

    def dot_rows(self, y: NDArray[np.float64] | float) -> NDArray[np.int64]:
        """Return rows of dots, counted from the top."""
        scaled = np.log10(y) if self._window.log else np.asarray(y)
        # Divided first: the difference of huge limits overflows.
        share = (self._high / 2 - scaled / 2) / (self._high / 2 - self._low / 2)
        last = self._rows * DOTS_PER_ROW - 1
        return np.clip(np.rint(share * last), 0, last).astype(np.int64)

    def dot_columns(self, x: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return columns of dots, as fractions; those outside of the window are negative or too large."""
        last = self._columns * DOTS_PER_COLUMN - 1
        window = self._window
        return np.asarray((np.asarray(x) - window.low) / max(window.high - window.low, 1e-300) * last)

    def draw(self, series: Series, marker: str, style: str) -> None:
        """Draw a curve, or a point where a value has no neighbors."""
        columns = self._columns * DOTS_PER_COLUMN
        points: list[tuple[int, int]] = []
        mask = np.zeros((self._rows * DOTS_PER_ROW, columns), bool)
        for piece in downsample_min_max(series, self._window.low, self._window.high, columns):
            x, y = self.dot_columns(piece.x), self.dot_rows(piece.y)
            if marker in LINE_MARKERS and len(x) > 1:
                _draw_line(mask, x, y)
            else:
                points += zip(np.rint(x).astype(np.int64).tolist(), y.tolist(), strict=True)
        if marker == "dashed":
            mask[:, np.arange(columns) % DASH_PERIOD >= DASH_LENGTH] = False
        cells = mask.reshape(self._rows, DOTS_PER_ROW, self._columns, DOTS_PER_COLUMN)
        bits = np.einsum("rdcx,dx->rc", cells.astype(np.int64), DOT_BITS)
        number = self._style_number(style)
        drawn = bits > 0
        self._characters[drawn] = np.array([chr(BLANK_BRAILLE + bit) for bit in range(256)])[bits[drawn]]
        self._styles[drawn] = number
        for x_dot, y_dot in points:
            self._put(x_dot, y_dot, POINT if marker in LINE_MARKERS else marker, number)

    def draw_star(self, series: Series, x: float, style: str) -> None:
        """Mark the point of a curve that is nearest to `x`."""
        if (y := series.value_at(x)) is not None:
            self._put(round(float(self.dot_columns(x))), int(self.dot_rows(y)), STAR, self._style_number(style))

    def _put(self, x_dot: int, y_dot: int, character: str, style: int) -> None:
        column, row = x_dot // DOTS_PER_COLUMN, y_dot // DOTS_PER_ROW
        if 0 <= column < self._columns:
            self._characters[row, column], self._styles[row, column] = character, style

    def _style_number(self, style: str) -> int:
        self._style_names.append(style)
        return len(self._style_names) - 1

    def row(self, row: int) -> list[tuple[str, str]]:
        """Return the pieces of a row that have one style each."""
        styles = self._styles[row]
        edges = [0, *(np.flatnonzero(np.diff(styles)) + 1).tolist(), self._columns]
        characters = self._characters[row].tolist()
        return [("".join(characters[first:last]), self._style_names[styles[first]]) for first, last in pairwise(edges)]


def _draw_line(mask: Mask, x: NDArray[np.float64], y: NDArray[np.int64]) -> None:
    """Connect points, sorted by `x` (columns of dots, may lie outside of the mask), by a line without gaps."""
    height, width = mask.shape
    first, last = max(math.ceil(x[0] - 0.5), 0), min(math.floor(x[-1] + 0.5), width - 1)
    if last < first:
        return
    # The line crosses the edges between columns at these rows: neighboring columns touch there.
    edges = np.interp(np.arange(first, last + 2) - 0.5, x, y)
    highest, lowest = np.minimum(edges[:-1], edges[1:]), np.maximum(edges[:-1], edges[1:])
    columns = np.rint(x).astype(np.int64) - first
    inside = (columns >= 0) & (columns <= last - first)
    np.minimum.at(highest, columns[inside], y[inside])
    np.maximum.at(lowest, columns[inside], y[inside])
    rows = np.arange(height)[:, None]
    mask[:, first : last + 1] |= (rows >= np.floor(highest + 0.5)) & (rows <= np.ceil(lowest - 0.5).clip(highest))


def _x_axis(window: PlotWindow, left: int, width: int, axis_lines: int) -> list[Text]:
    """Return the axis line and its labels, in one line or two. The name of the axis is at the right end."""
    columns = width - left
    values = ticks(window.low, window.high, max(columns // X_TICK_COLUMNS, 2))
    rule, labels = ["─"] * columns, [" "] * (width + 1)
    name = f" {window.x_name}" if window.x_name else ""
    end = width - len(name)
    labels[end:] = name
    free_from = 0
    for value, label in zip(values, tick_labels(values), strict=True):
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
    return [Text(line, MUTED, no_wrap=True, end="") for line in lines]
