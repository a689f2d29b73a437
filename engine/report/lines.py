"""Reads what a report shows of a run in one pass over its journal, and draws curves in the colors of a report.

`engine.report.page` draws charts for a page, `engine.report.plot` a figure for a paper. A curve has gaps at NaN, pale
raw values behind a smoothed line, and the spread of runs as a band. matplotlib is imported on the first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.base.libraries import import_library
from engine.base.text import printable
from engine.base.ticks import log_ticks, tick_labels
from engine.report.charts import Chart, MeasuredOn
from engine.report.foreign_run import OnRead, describe, read_whole
from engine.runs.curves import MAX_METRIC_COLUMNS, BlockSeries, Curves, XAxis
from engine.runs.find import OpenedRun
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.runs.journal_source import journal_run
from engine.runs.metrics import find_metric
from engine.runs.run_row import RunRow, open_run
from engine.runs.series import FloatArray, Series, mask_nonpositive, mean_and_spread, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = "gputrain report"
# From the color-blind safe palette of Okabe and Ito, in the order of the curves.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999933", "#000000")
# Lengths of dashes and gaps in line widths. Seven patterns and eight colors make 56 different lines.
DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (5, 1.8),
    (1.3, 1.5),
    (6, 1.6, 1.3, 1.6),
    (9, 2),
    (3, 1.3),
    (6, 1.6, 1.3, 1.6, 1.3, 1.6),
)
SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 3.0,
    # A name with two dollar signs is no formula.
    "text.parse_math": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    # Text stays text: selectable, searchable, and in the font of the document.
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    # Without a salt, the ids of an SVG are random.
    "svg.hashsalt": "gputrain",
    "path.simplify": True,
    "path.simplify_threshold": 0.1,
}


def dashes(index: int) -> tuple[float, ...]:
    """Return the dash pattern of a curve by its index; empty for a solid line."""
    return DASHES[index % len(DASHES)]


@contextmanager
def drawing() -> Iterator[Any]:
    """Set fonts and colors, and yield the class `Figure`. Draw and save within the block.

    Raises UsageError if matplotlib is not installed.
    """
    figure_class = import_library("matplotlib.figure", COMMAND).Figure
    with import_library("matplotlib", COMMAND).rc_context(SETTINGS):
        yield figure_class


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run, of gputrain or foreign: what a comparison needs of it, and its curves in blocks."""

    row: RunRow
    curves: Curves


@dataclass(frozen=True, eq=False)
class OwnRun(ReportedRun):
    """A run of gputrain: also its folder and its history."""

    folder: RunFolder
    history: History


def read_reported_run(
    run: OpenedRun, max_columns: int = MAX_METRIC_COLUMNS, on_read: OnRead | None = None
) -> ReportedRun:
    """Read a run. Its curves have at most `max_columns` points and blocks each, so a long run takes no more space than
    a short one.

    A million `step` events take about 5 s. What cannot be read is a `problem` of `row`.
    """
    if not isinstance(run, RunFolder):
        reader = read_whole(run, on_read, max_columns)
        return ReportedRun(describe(reader), reader.curves)
    history = History()
    reader = read_whole(journal_run(run, on_event=history.add), max_columns=max_columns)
    row = open_run(run)
    row = row._replace(problem=row.problem or "; ".join(reader.problems) or None)
    return OwnRun(row, reader.curves, run, history)


LINE_WIDTH, RAW_WIDTH = 1.1, 0.7
RAW_OPACITY, BAND_OPACITY = 0.3, 0.2
# More points are a line without markers.
MAX_MARKED_POINTS = 30
# The difference of two larger values may be infinite, which no axis of matplotlib has.
MAX_DRAWN_VALUE = 1e300
# Labels of a logarithmic axis, at most.
MAX_LOG_LABELS = 8
NO_LABELS: Mapping[str, str] = {}
MAX_LABEL_CHARACTERS = 60


@dataclass(frozen=True, eq=False)
class Line:
    """One curve. `style` is the index of its color and of its dash pattern.

    `raw` is drawn pale behind it. `band` is the lower and the upper limit of an area.
    """

    label: str
    series: Series
    style: int
    raw: Series | None = None
    band: tuple[Series, Series] | None = None
    odd: FloatArray = field(default_factory=lambda: np.empty(0))
    """Where a value was NaN or infinite."""
    restarts: FloatArray = field(default_factory=lambda: np.empty(0))
    """Where the run went on from an earlier step."""


def chart_lines(
    chart: Chart,
    groups: Sequence[Sequence[ReportedRun]],
    axis: XAxis,
    smoothing: float,
    labels: Mapping[str, str] = NO_LABELS,
) -> list[Line]:
    """Return the lines of a chart that have a value: those of each metric of one run, or one of each group of runs.

    The runs of a group are one line. Of several groups, it is that of the main metric that has values. `smoothing` is
    the share of the steps over which curves are averaged, and `labels` are other names for metrics.
    """
    lines: list[Line] = []
    for key in sorted(chart.metrics, key=lambda key: chart.metrics[key] is not MeasuredOn.VALIDATION):
        of_key = [_group_line(chart, key, runs, axis, smoothing) for runs in groups]
        label = shortened(labels.get(key) or find_metric(key).label)
        drawn = [replace(line, label=label, style=index) for index, line in enumerate(of_key)]
        known = [line for line in drawn if np.isfinite(line.series.y).any()]
        if len(groups) == 1:
            lines += [replace(line, style=len(lines)) for line in known]
        elif not lines:
            # Raw values of several runs would hide each other.
            lines = [replace(line, raw=None) for line in known]
    return lines


def _group_line(chart: Chart, key: str, runs: Sequence[ReportedRun], axis: XAxis, smoothing: float) -> Line:
    # Few points are values of epochs, not of steps.
    is_long = all(run.curves.is_long(key) for run in runs)
    share = smoothing if chart.is_smoothed(key) and is_long else 0.0
    return make_line([run.curves.over(run.curves.name_of(key), axis) for run in runs], share)


def make_line(blocks: Sequence[BlockSeries], smoothing: float = 0.0) -> Line:
    """Return the curve of one run, or the mean and the standard deviation of several."""
    if len(blocks) > 1:
        mean, band = mean_and_spread([block.means for block in blocks])
        if smoothing:
            mean, *band = (smooth(series, smoothing) for series in (mean, *band))  # type: ignore[assignment]
        return Line("", mean, 0, band=band)
    block = blocks[0]
    drawn, raw = (smooth(block.means, smoothing), block.points) if smoothing else (block.points, None)
    return Line("", drawn, 0, raw, odd=block.odd, restarts=block.restarts)


def draw_lines(axes: Axes, lines: Sequence[Line], axis: XAxis, *, log: bool = False) -> None:
    """Draw curves and fit the limits of the axes to them. NaN is a gap; a log axis has gaps at zero and below."""
    if log:
        axes.set_yscale("log", nonpositive="mask")
    for line in lines:
        color = COLORS[line.style % len(COLORS)]
        if line.raw is not None:
            raw = _drawable(line.raw, log=log)
            axes.plot(raw.x, raw.y, color=color, alpha=RAW_OPACITY, linewidth=RAW_WIDTH)
        if line.band is not None:
            low, high = (_drawable(part, log=log) for part in line.band)
            known = np.isfinite(low.y) & np.isfinite(high.y)
            axes.fill_between(low.x, low.y, high.y, where=known.tolist(), color=color, alpha=BAND_OPACITY, linewidth=0)
        series, pattern = _drawable(line.series, log=log), dashes(line.style)
        marker = "o" if np.isfinite(series.y).sum() <= MAX_MARKED_POINTS else ""
        style = (0, pattern) if pattern else "solid"
        axes.plot(
            series.x, series.y, color=color, linewidth=LINE_WIDTH, linestyle=style, marker=marker, markersize=2.7,
            label=line.label,
        )  # fmt: skip
        for x in line.restarts:
            axes.axvline(x, color=color, linewidth=RAW_WIDTH, linestyle=":")
        if len(line.odd):
            axes.plot(line.odd, np.zeros(len(line.odd)), "x", color=color, transform=axes.get_xaxis_transform())
    axes.margins(x=0.02)
    if axis != "hours":
        axes.locator_params("x", integer=True, min_n_ticks=1)
    if log:
        # matplotlib labels no major tick within one decade.
        values = log_ticks(*axes.get_ylim(), MAX_LOG_LABELS)
        axes.set_yticks(values, tick_labels(values, log=True))
        axes.yaxis.set_minor_formatter(lambda value, _: "")


def _drawable(series: Series, *, log: bool) -> Series:
    """Return a series with gaps at values that an axis cannot show."""
    with np.errstate(invalid="ignore"):
        series = Series(series.x, np.where(np.abs(series.y) <= MAX_DRAWN_VALUE, series.y, np.nan))
    return mask_nonpositive(series) if log else series


def shortened(label: str, characters: int = MAX_LABEL_CHARACTERS) -> str:
    """Return a label of bounded length. A legend leaves out labels that begin with an underscore."""
    label = printable(label)
    label = label if len(label) <= characters else label[: characters - 1] + "…"
    return f" {label}" if label.startswith("_") else label
