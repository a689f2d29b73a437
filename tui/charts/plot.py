"""Plots of curves as lines of text, drawn by plotext; `tui.widgets.chart` shows them.

plotext only receives finite values, because a NaN ends the process (plotext 6.1), and at most two points per column of
Braille dots, because its run time grows with the points. Its figure is global, so call `plot` from one thread only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
from tui.palette import pale_style

# A Braille character is two dots wide.
DOTS_PER_COLUMN = 2
BLANK_BRAILLE = "\u2800"
MAX_JOINED_GAP_COLUMNS = 6
MIN_WIDTH, MIN_HEIGHT = 16, 4
MIN_MARKER_COLUMNS = 12


@dataclass(frozen=True)
class Curve:
    """A named series. `marker` is "braille" for a line or a character for points; `style` is one of `SERIES`."""

    label: str
    series: Series
    marker: str
    style: str


@dataclass(frozen=True)
class PlotWindow:
    """The visible part of the x axis, from `low` to `high`, and how the curves are drawn in it."""

    low: float
    high: float
    log: bool = False
    smoothing: float = 0.0
    """Share of the points in the window that the moving average covers; 0 disables smoothing."""


@dataclass(frozen=True)
class Plot:
    """A drawn plot. The x axis starts at column `area_left` and is `area_width` columns long; 0 without curves."""

    lines: list[Text]
    area_left: int = 0
    area_width: int = 0


def plot(curves: Sequence[Curve], window: PlotWindow, width: int, height: int) -> Plot:
    """Plot the curves as `height` lines of `width` columns, or return one line that says why nothing is drawn."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return Plot([Text("Too small to draw")])
    visible = [(curve, curve.series.between(window.low, window.high)) for curve in curves]
    if window.log:
        visible = [(curve, mask_nonpositive(series)) for curve, series in visible]
    ys = [limit for _, series in visible for limit in series.y_limits() or ()]
    if not ys:
        return Plot([Text(_empty_message(visible, window.log))])
    return _draw(visible, window, pad_limits(min(ys), max(ys), window.log), width, height)


def _parse_ansi(line: str, styles: Sequence[str]) -> Text:
    """Convert a line of plotext output to `Text`; color number `n` stands for `styles[n]`.

    A short gap between two strokes of one color becomes blank Braille, which takes fewer bytes than two color changes.
    """
    first, *parts = line.split("\x1b[")
    pieces: list[tuple[str, str]] = [(first, "")] if first else []
    style = ""
    for part in parts:
        code, _, text = part.partition("m")
        if code == "0":
            style = ""
        elif code.startswith("38;5;"):
            style = styles[int(code.removeprefix("38;5;"))]
        if text:
            pieces.append((text, style))
            _merge_across_gap(pieces)
    return Text.assemble(*pieces, no_wrap=True, end="")


def _merge_across_gap(pieces: list[tuple[str, str]]) -> None:
    if len(pieces) < 3:
        return
    (left, left_style), (gap, _), (right, right_style) = pieces[-3:]
    if left_style != right_style or not gap.isspace() or len(gap) > MAX_JOINED_GAP_COLUMNS:
        return
    if left[-1] > BLANK_BRAILLE < right[0]:
        pieces[-3:] = [(left + BLANK_BRAILLE * len(gap) + right, left_style)]


def _empty_message(visible: Sequence[tuple[Curve, Series]], log: bool) -> str:
    if any(len(series.y) for _, series in visible):
        return "No positive value for the log scale" if log else "No finite value"
    return "No data yet"


def _draw(
    visible: Sequence[tuple[Curve, Series]], window: PlotWindow, y_limits: tuple[float, float], width: int, height: int
) -> Plot:
    import plotext
    from plotext import pixel

    (low, high), log = y_limits, window.log
    y_ticks = (log_ticks if log else ticks)(low, high, max(height // 3, 2))
    y_labels = tick_labels(y_ticks)
    # plotext reserves the columns of the longest y label and of the axis line.
    left = max(map(len, y_labels), default=0) + 1
    inner = max(width - left, 2)
    x_ticks = ticks(window.low, window.high, max(inner // 12, 2))

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.canvas("default")
    figure.legend(False)
    figure.axes(False)
    figure.axes(True, side=0)
    figure.ruler(0, 0).lim(window.low, window.high)
    figure.ruler(1, 0).lim(_scaled(low, log), _scaled(high, log))
    figure.ruler(0, 0).ticks(x_ticks, tick_labels(x_ticks))
    figure.ruler(1, 0).ticks([_scaled(tick, log) for tick in y_ticks], y_labels)

    def stroke(series: Series, marker: str, color: int, columns: int) -> None:
        for piece in downsample_min_max(series, window.low, window.high, columns):
            paint = pixel(foreground=color)
            ys = [_scaled(y, log) for y in piece.y.tolist()]
            signal = figure.signal(piece.x.tolist(), ys, marker=plotext.marker(marker, pixel=paint))
            figure.draw(signal.lines() if marker == "braille" and len(ys) > 1 else signal)

    styles = [curve.style for curve, _ in visible]
    for color, (curve, series) in enumerate(visible):
        columns = DOTS_PER_COLUMN * inner if curve.marker == "braille" else max(inner // 2, MIN_MARKER_COLUMNS)
        if window.smoothing and curve.marker == "braille" and len(series.y) > 2:
            stroke(series, curve.marker, len(visible) + color, columns // 2)
            stroke(smooth(series, window.smoothing), curve.marker, color, columns)
        else:
            stroke(series, curve.marker, color, columns)
    text: str = figure.build().string()
    styles += [pale_style(style) for style in styles]
    return Plot([_parse_ansi(line, styles) for line in text.rstrip("\n").split("\n")], left, inner)


def _scaled(value: float, log: bool) -> float:
    return math.log10(value) if log else float(value)
