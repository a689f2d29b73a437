"""The charts of a page: curves of several runs over the epochs, and where the time of a run went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.report.lines import Line, draw_lines, make_line, whole_x_ticks
from engine.report.runs import ReportedRun
from engine.report.style import PAGE, drawing, to_inline_svg
from engine.report.timeline import EpochTime
from engine.runs.curves import XAxis
from engine.runs.metrics import METRICS
from engine.show.charts import Chart, Place, Source, charts_of

# Inches. At the width of a phone, a point of the figure is a point of the screen.
CHART_SIZE, TIME_CHART_SIZE = (4.7, 2.7), (7.4, 2.2)
# Color and dash of the curves of one run.
LINE_STYLES = {
    Source.TRAINING: (0, 0), Source.VALIDATION: (5, 1), Source.EMA: (2, 2), Source.TOP5: (3, 3), Source.ONLY: (0, 0),
}  # fmt: skip
# With fewer classes, the label is all but always among five.
MIN_TOP5_CLASSES = 11
TRAIN_SMOOTHING = 0.04
"""Share of the steps over which the training loss is averaged."""
# More epochs are averaged in groups.
MAX_TIME_BARS = 100
MIN_TIME_EPOCHS = 8
# Letters at the ends of more lines would need too much room.
MAX_MARKED_LINES = 6
# The parts of an epoch, with the index of their color. Neighbors differ in lightness, too. Hatches would make a printed
# page ten times as large, because browsers print them as bitmaps.
TIME_PARTS = (
    ("waited", "waiting for data", 5),
    ("forward", "forward pass", 0),
    ("rest", "backward pass, communication, optimizer", 4),
    ("evaluation", "evaluation", 2),
    ("other", "training and evaluation", 0),
)


@dataclass(frozen=True)
class PageChart:
    """A chart of the page: its heading, its `<svg>`, and one sentence on how to read it."""

    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Group:
    """A run, or several that differ in the seed alone, on the charts: its letter, and the index of its line."""

    letter: str
    runs: tuple[ReportedRun, ...]
    index: int


def curve_charts(groups: Sequence[Group], command: str) -> list[PageChart]:
    """Return the charts of loss, accuracy, learning rate and throughput; charts without a value are skipped."""
    runs = [run for group in groups for run in group.runs]
    return _single_run_charts(runs[0], command) if len(runs) == 1 else _overlaid_charts(groups, command)


def _axis(runs: Sequence[ReportedRun]) -> XAxis:
    """Return epochs as the x axis if all runs have them."""
    return "epoch" if all(run.curves.axes.steps_per_epoch > 0 for run in runs) else "step"


def _single_run_charts(run: ReportedRun, command: str) -> list[PageChart]:
    axis, started = _axis([run]), run.history.started
    has_top5 = started is not None and started.classes >= MIN_TOP5_CLASSES
    specs = []
    for chart in charts_of(Place.REPORT_OF_ONE):
        lines = [
            _run_line(run, chart, key, axis)
            for key, source in chart.metrics.items()
            if has_top5 or source is not Source.TOP5
        ]
        note = "The pale line is the loss of every step, the line on it their moving average." if chart.smoothed else ""
        specs.append((chart, lines, note))
    return _draw_all(command, specs, axis, run.curves.last_x(axis))


def _run_line(run: ReportedRun, chart: Chart, key: str, axis: XAxis) -> Line:
    color, dash = LINE_STYLES[chart.metrics[key]]
    label, curve = METRICS[key].label if len(chart.metrics) > 1 else "", run.curves.over(key, axis)
    if chart.is_smoothed(key):
        return make_line(label, [curve], color, smoothing=TRAIN_SMOOTHING)
    return Line(label, curve.points, color, dash)


def _overlaid_charts(groups: Sequence[Group], command: str) -> list[PageChart]:
    axis = _axis([run for group in groups for run in group.runs])

    def mark(group: Group) -> str:
        return group.letter if len(groups) <= MAX_MARKED_LINES else ""

    def lines(chart: Chart) -> list[Line]:
        curves = [[run.curves.over(chart.id, axis) for run in group.runs] for group in groups]
        smoothing = TRAIN_SMOOTHING if chart.smoothed else 0.0
        drawn = [
            make_line("", runs, group.index, smoothing=smoothing, mark=mark(group))
            for group, runs in zip(groups, curves, strict=True)
        ]
        # Raw values of several runs would hide each other.
        return [replace(line, raw=None) for line in drawn]

    specs = [
        (chart, lines(chart), "Moving average." if chart.smoothed else "")
        for chart in charts_of(Place.REPORT_OF_SEVERAL)
    ]
    last = max(run.curves.last_x(axis) for group in groups for run in group.runs)
    return _draw_all(command, specs, axis, last)


def _draw_all(
    command: str, specs: Sequence[tuple[Chart, list[Line], str]], axis: XAxis, last: float
) -> list[PageChart]:
    """Return each chart, with its lines and its note, unless no line has a finite value."""
    charts = []
    with drawing(command, PAGE) as figure_class:
        for number, (chart, lines, note) in enumerate(specs):
            drawn = [line for line in lines if np.isfinite(line.series.y).any()]
            if not drawn:
                continue
            figure = figure_class(figsize=CHART_SIZE, layout="constrained")
            axes = figure.subplots()
            draw_lines(axes, drawn, PAGE)
            axes.set_xlabel(axis)
            whole_x_ticks(axes, axis)
            # All charts have the same x axis, also if some curves begin later.
            axes.set_xlim(-0.02 * last, 1.03 * last)
            if chart.from_zero:
                axes.set_ylim(bottom=0)
            if any(line.label for line in drawn):
                axes.legend(loc="best", handlelength=2.6)
            svg = to_inline_svg(figure, f"c{number}", f"{chart.title} over the {axis}s")
            charts.append(PageChart(chart.title, svg, note))
    return charts


def time_chart(epochs: Sequence[EpochTime], name: str, command: str) -> PageChart | None:
    """Return how long each epoch took and what for, as stacked bars; None if that is unknown."""
    if not epochs:
        return None
    groups = np.array_split(np.arange(len(epochs)), min(len(epochs), MAX_TIME_BARS))
    # A bar begins half an epoch before its first one, so that a tick is below the middle of an epoch.
    positions = np.array([epochs[group[0]].epoch - 0.5 for group in groups])
    widths = np.diff(positions, append=epochs[-1].epoch + 0.5)
    with drawing(command, PAGE) as figure_class:
        figure = figure_class(figsize=TIME_CHART_SIZE, layout="constrained")
        axes = figure.subplots()
        bottom = np.zeros(len(groups))
        for field, label, color in TIME_PARTS:
            heights = np.array([_mean([getattr(epochs[index], field) for index in group]) for group in groups])
            if not heights.any():
                continue
            axes.bar(
                positions, heights, widths, bottom, align="edge", color=PAGE.color(color), edgecolor=PAGE.paper,
                linewidth=0.4, label=label,
            )  # fmt: skip
            bottom += heights
        axes.set_xlabel("epoch")
        whole_x_ticks(axes, "epoch")
        axes.set_ylabel("seconds (mean)" if len(groups) < len(epochs) else "seconds")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, columnspacing=1.2, handlelength=1.6)
        # A short run has narrow bars, too.
        axes.set_xlim(positions[0], max(positions[-1] + widths[-1], positions[0] + MIN_TIME_EPOCHS))
        title = "Time of each epoch"
        return PageChart(title, to_inline_svg(figure, name, title))


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values, 0 without any."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else 0.0
