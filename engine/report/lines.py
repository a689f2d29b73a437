"""Draws curves with matplotlib: gaps at NaN, pale raw values behind a smoothed line, the spread of runs as a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.report.style import Theme, dashes
from engine.runs.curves import XAxis
from engine.runs.reduced_curves import BlockSeries
from engine.runs.series import Series, mask_nonpositive, mean_and_spread, smooth
from engine.utils.ticks import log_ticks, tick_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RAW_OPACITY, BAND_OPACITY, FAINT_OPACITY = 0.3, 0.2, 0.65
# More points are a line without markers.
MAX_MARKED_POINTS = 30
# The difference of two larger values may be infinite, which no axis of matplotlib has.
MAX_DRAWN_VALUE = 1e300
# Labels of a logarithmic axis, at most.
MAX_LOG_LABELS = 8


@dataclass(frozen=True, eq=False)
class Line:
    """One curve. `color` and `dash` are indices of the palette and of the dash patterns.

    `raw` is drawn pale behind it. `band` is the lower and the upper limit of an area. `mark` is written at its end.
    """

    label: str
    series: Series
    color: int
    dash: int
    raw: Series | None = None
    band: tuple[Series, Series] | None = None
    mark: str = ""
    is_faint: bool = False
    """Whether the curve is thin and pale, to stand behind the main curve of its run."""


def make_line(label: str, blocks: Sequence[BlockSeries], index: int, *, smoothing: float = 0.0, mark: str = "") -> Line:
    """Return the curve of one run, or the mean and the standard deviation of several.

    `smoothing` is the share of the points over which the curve is averaged; 0 for none.
    """
    if len(blocks) > 1:
        mean, (low, high) = mean_and_spread([block.means for block in blocks])
        if smoothing:
            mean, low, high = (smooth(series, smoothing) for series in (mean, low, high))
        return Line(label, mean, index, index, band=(low, high), mark=mark)
    block = blocks[0]
    means = smooth(block.means, smoothing) if smoothing else block.means
    raw = block.points if means is not block.points else None
    return Line(label, means, index, index, raw=raw, mark=mark)


def draw_lines(axes: Axes, lines: Sequence[Line], theme: Theme, *, log: bool = False, width: float = 1.3) -> None:
    """Draw curves and fit the limits of the axes to them. NaN is a gap; a log axis has gaps at zero and below."""
    if log:
        axes.set_yscale("log", nonpositive="mask")
    for number, line in enumerate(lines):
        color, dash = theme.color(line.color), dashes(line.dash)
        if line.raw is not None:
            raw = _drawable(line.raw, log=log)
            axes.plot(raw.x, raw.y, color=color, alpha=RAW_OPACITY, linewidth=0.6 * width)
        if line.band is not None:
            low, high = (_drawable(part, log=log) for part in line.band)
            known = np.isfinite(low.y) & np.isfinite(high.y)
            axes.fill_between(low.x, low.y, high.y, where=known.tolist(), color=color, alpha=BAND_OPACITY, linewidth=0)
        series = _drawable(line.series, log=log)
        finite = np.isfinite(series.y)
        thickness, opacity = (0.6 * width, FAINT_OPACITY) if line.is_faint else (width, 1.0)
        (drawn,) = axes.plot(series.x, series.y, color=color, linewidth=thickness, alpha=opacity, label=line.label)
        if dash:
            drawn.set_dashes(dash)
        if finite.sum() <= MAX_MARKED_POINTS and not line.is_faint:
            drawn.set_marker("o")
            drawn.set_markersize(1.6 + width)
        elif (alone := isolated_points(finite)).any():
            axes.plot(series.x[alone], series.y[alone], color=color, linestyle="none", marker="o", markersize=1 + width)
        if line.mark and finite.any():
            last = int(np.flatnonzero(finite)[-1])
            axes.annotate(
                line.mark,
                (float(series.x[last]), float(series.y[last])),
                # Side by side, because lines may end at the same height.
                (3 + 7 * number, 0),
                textcoords="offset points",
                color=color,
                fontweight="bold",
                verticalalignment="center",
                annotation_clip=False,
            )
    axes.margins(x=0.02)
    if log:
        _label_log_axis(axes)


def _drawable(series: Series, *, log: bool) -> Series:
    """Return a series with gaps at values that an axis cannot show."""
    limits = series.y_limits()
    if limits is not None and max(-limits[0], limits[1]) > MAX_DRAWN_VALUE:
        series = Series(series.x, np.where(np.abs(series.y) <= MAX_DRAWN_VALUE, series.y, np.nan))
    return mask_nonpositive(series) if log else series


def _label_log_axis(axes: Axes) -> None:
    """Label a logarithmic axis with plain numbers, also within one decade, where matplotlib labels no major tick."""
    values = log_ticks(*axes.get_ylim(), MAX_LOG_LABELS)
    axes.set_yticks(values, tick_labels(values, log=True))
    axes.yaxis.set_minor_formatter(lambda value, _: "")


def whole_x_ticks(axes: Axes, axis: XAxis) -> None:
    """Put the ticks of the x axis on whole epochs, steps or images."""
    if axis != "hours":
        axes.locator_params("x", integer=True, min_n_ticks=1)


def isolated_points(finite: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which finite points have no finite neighbor: a line does not show them."""
    padded = np.pad(finite, 1)
    return finite & ~padded[:-2] & ~padded[2:]
