"""Curves as lines of text, by plotext. Only finite numbers cross into it, at most two for each column of dots: a NaN
would end the process (plotext 6.1), and its time grows with the points. Its figure is one for the whole process, so it
is drawn from one thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from tui.axis import Series, above_zero, log_ticks, padded, reduce_to_columns, smooth, tick_labels, ticks

# A character of Braille is two dots wide.
DOTS = 2
LEAST_WIDTH, LEAST_HEIGHT = 16, 4
SIGN_COLUMNS = 12


@dataclass(frozen=True)
class Curve:
    """`marker` is `braille`, which is joined by lines, or a sign; `colour` is one of the terminal's 256."""

    label: str
    series: Series
    marker: str
    colour: int


@dataclass(frozen=True)
class Window:
    """What of the curves is seen: from `low` to `high` on the x axis; `cursor` is a place on it."""

    low: float
    high: float
    log: bool = False
    smoothing: float = 0.0
    """The share of the points in the window that is drawn as one."""
    cursor: float | None = None


def plot(curves: Sequence[Curve], window: Window, width: int, height: int) -> list[Text]:
    """`height` lines of `width` columns; those that do not fit, or an empty plot, say so."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return [Text("too small to draw")]
    seen = [(curve, curve.series.between(window.low, window.high)) for curve in curves]
    if window.log:
        seen = [(curve, above_zero(series)) for curve, series in seen]
    ys = [limit for _, series in seen for limit in series.limits() or ()]
    if not ys:
        return [Text(_nothing(seen, window.log))]
    low, high = padded(min(ys), max(ys), window.log)
    lines = _draw(seen, window, (low, high), width, height)
    return [Text.from_ansi(line, no_wrap=True) for line in lines]


def _nothing(seen: Sequence[tuple[Curve, Series]], log: bool) -> str:
    if any(len(series.y) for _, series in seen):
        return "nothing that can be drawn: no value is a number above 0" if log else "no value is a finite number"
    return "no data here yet"


def _draw(
    seen: Sequence[tuple[Curve, Series]], window: Window, y_limits: tuple[float, float], width: int, height: int
) -> list[str]:
    import plotext
    from plotext import pixel

    (low, high), log = y_limits, window.log
    y_ticks = (log_ticks if log else ticks)(low, high, max(height // 3, 2))
    y_labels = tick_labels(y_ticks)
    # plotext takes the width of the longest label and of the axis off.
    inner = max(width - max(map(len, y_labels), default=0) - 1, 2)
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

    def stroke(series: Series, marker: str, colour: int, columns: int, style: str | None = None) -> None:
        for piece in reduce_to_columns(series, window.low, window.high, columns):
            paint = pixel(foreground=colour, style=style) if style else pixel(foreground=colour)
            ys = [_scaled(y, log) for y in piece.y.tolist()]
            signal = figure.signal(piece.x.tolist(), ys, marker=plotext.marker(marker, pixel=paint))
            figure.draw(signal.lines() if marker == "braille" and len(ys) > 1 else signal)

    for curve, series in seen:
        columns = DOTS * inner if curve.marker == "braille" else max(inner // 2, SIGN_COLUMNS)
        if window.smoothing and curve.marker == "braille" and len(series.y) > 2:
            stroke(series, curve.marker, curve.colour, columns // 2, "dim")
            stroke(smooth(series, window.smoothing), curve.marker, curve.colour, columns)
        else:
            stroke(series, curve.marker, curve.colour, columns)
    if window.cursor is not None and window.low <= window.cursor <= window.high:
        figure.draw(figure.signal([window.cursor] * 2, [_scaled(low, log), _scaled(high, log)], marker="│").lines())
    text: str = figure.build().string()
    return text.rstrip("\n").split("\n")


def _scaled(value: float, log: bool) -> float:
    return math.log10(value) if log else float(value)
