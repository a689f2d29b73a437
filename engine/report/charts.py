"""The charts of a page: curves of one run or of several over the epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.report.lines import Line, draw_lines, make_line, whole_x_ticks
from engine.report.runs import ForeignReport, OwnRun, ReportedRun
from engine.report.sections import short_name
from engine.report.style import PAGE, drawing, to_inline_svg
from engine.runs.curves import XAxis
from engine.runs.metrics import METRICS
from engine.show.charts import Chart, Place, Source, charts_of, metric_chart
from engine.show.foreign_charts import curve_labels, group_metrics
from engine.show.foreign_run import default_axis, further_keys

# Inches. At the width of a phone, a point of the figure is a point of the screen.
CHART_SIZE = (4.7, 2.7)
# Color and dash of the curves of one run.
LINE_STYLES = {
    Source.TRAINING: (0, 0), Source.VALIDATION: (5, 1), Source.EMA: (2, 2), Source.TOP5: (3, 3), Source.ONLY: (0, 0),
    Source.TEST: (2, 2),
}  # fmt: skip
# With fewer classes, the label is all but always among five.
MIN_TOP5_CLASSES = 11
TRAIN_SMOOTHING = 0.04
"""Share of the steps over which the training loss is averaged."""
# A page with more would take seconds to open.
MAX_CHARTS = 40
# Letters at the ends of more lines would need too much room.
MAX_MARKED_LINES = 6


@dataclass(frozen=True)
class PageChart:
    """A chart of the page: its heading, its `<svg>`, and one sentence on how to read it."""

    title: str
    svg: str
    note: str = ""


class _Spec(NamedTuple):
    """A chart that is not drawn yet: its lines, and how to read it."""

    chart: Chart
    lines: list[Line]
    note: str


@dataclass(frozen=True)
class Group:
    """A run, or several that differ in the seed alone, on the charts: its letter, and the index of its line."""

    letter: str
    runs: tuple[ReportedRun, ...]
    index: int


def curve_charts(groups: Sequence[Group], command: str) -> tuple[list[PageChart], int]:
    """Return the charts of the metrics that have a value, and how many more there are.

    Runs of gputrain have those of loss, accuracy, learning rate and throughput, foreign runs one for each metric.
    """
    runs = [run for group in groups for run in group.runs]
    axis = default_axis(run.curves for run in runs)
    if len(runs) > 1:
        specs = _overlaid_charts(groups, axis)
    elif isinstance(run := runs[0], ForeignReport):
        specs = _foreign_run_charts(run, axis)
    else:
        specs = _own_run_charts(run, axis)
    known = [spec for spec in specs if any(np.isfinite(line.series.y).any() for line in spec.lines)]
    last = max(run.curves.last_x(axis) for run in runs)
    return _draw_all(command, known[:MAX_CHARTS], axis, last), max(len(known) - MAX_CHARTS, 0)


def _own_run_charts(run: ReportedRun, axis: XAxis) -> list[_Spec]:
    started = run.history.started if isinstance(run, OwnRun) else None
    has_top5 = started is not None and started.classes >= MIN_TOP5_CLASSES
    specs = []
    for chart in charts_of(Place.REPORT_OF_ONE):
        lines = [
            _run_line(run, chart, key, axis)
            for key, source in chart.metrics.items()
            if has_top5 or source is not Source.TOP5
        ]
        note = "The pale line is the loss of every step, the line on it their moving average." if chart.smoothed else ""
        specs.append(_Spec(chart, lines, note))
    return specs


def _run_line(run: ReportedRun, chart: Chart, key: str, axis: XAxis) -> Line:
    color, dash = LINE_STYLES[chart.metrics[key]]
    label, curve = METRICS[key].label if len(chart.metrics) > 1 else "", run.curves.over(key, axis)
    if chart.is_smoothed(key):
        return make_line(label, [curve], color, smoothing=TRAIN_SMOOTHING)
    return Line(label, curve.points, color, dash)


def _foreign_run_charts(run: ForeignReport, axis: XAxis) -> list[_Spec]:
    """Return the charts of the metrics, by their names: those of training and validation share one."""
    specs = []
    for chart in group_metrics(run.curves.names):
        labels = curve_labels(chart)
        is_named_by_source = len(set(chart.metrics.values())) == len(chart.metrics)
        lines = []
        for number, (name, source) in enumerate(chart.metrics.items()):
            color, dash = LINE_STYLES[source] if is_named_by_source else (number, number)
            key = run.curves.keys[name]
            curve = run.curves.over(key, axis)
            line = make_line(short_name(labels[name]), [curve], color, smoothing=_smoothing(chart, key, [run]))
            lines.append(replace(line, dash=dash))
        is_smoothed = any(line.raw is not None for line in lines)
        note = "Pale lines are all values, the lines on them their moving average." if is_smoothed else ""
        specs.append(_Spec(chart, lines, note))
    return specs


def _smoothing(chart: Chart, key: str, runs: Sequence[ReportedRun]) -> float:
    """Return the share of the points over which a curve is averaged. Few points are values of epochs, not of steps."""
    is_short = any(isinstance(run, ForeignReport) and not run.curves.is_long(key) for run in runs)
    return TRAIN_SMOOTHING if chart.smoothed and not is_short else 0.0


def _overlaid_charts(groups: Sequence[Group], axis: XAxis) -> list[_Spec]:
    def mark(group: Group) -> str:
        return group.letter if len(groups) <= MAX_MARKED_LINES else ""

    def spec(chart: Chart) -> _Spec:
        lines, is_smoothed = [], False
        for group in groups:
            curves = [run.curves.over(chart.id, axis) for run in group.runs]
            smoothing = _smoothing(chart, chart.id, group.runs)
            is_smoothed = is_smoothed or smoothing > 0
            # Raw values of several runs would hide each other.
            line = make_line("", curves, group.index, smoothing=smoothing, mark=mark(group))
            lines.append(replace(line, raw=None))
        return _Spec(chart, lines, "Moving average." if is_smoothed else "")

    charts = list(charts_of(Place.REPORT_OF_SEVERAL))
    foreign = [run.curves for group in groups for run in group.runs if isinstance(run, ForeignReport)]
    charts += [metric_chart(key, smoothed=True) for key in further_keys(foreign, {chart.id for chart in charts})]
    return [spec(chart) for chart in charts]


def _draw_all(command: str, specs: Sequence[_Spec], axis: XAxis, last: float) -> list[PageChart]:
    """Return each chart, with its lines and its note."""
    charts = []
    with drawing(command, PAGE) as figure_class:
        for number, (chart, lines, note) in enumerate(specs):
            drawn = [line for line in lines if np.isfinite(line.series.y).any()]
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
            title = short_name(chart.title)
            svg = to_inline_svg(figure, f"c{number}", f"{title} over the {axis}s")
            charts.append(PageChart(title, svg, note))
    return charts
