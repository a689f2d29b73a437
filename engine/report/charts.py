"""The charts of a page: curves of one run or of several over the epochs."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.report.lines import chart_lines, draw_lines, shortened
from engine.report.pictures import data_uri
from engine.report.plot import METADATA, X_LABELS
from engine.report.runs import ReportedRun
from engine.report.style import drawing
from engine.runs.curves import default_axis
from engine.show.charts import Chart, Place, charts_of, compared_charts, curve_labels, foreign_charts

# Inches. At the width of a phone, a point of the figure is a point of the screen.
CHART_SIZE = (4.2, 2.4)
# Share of the steps over which losses are averaged.
SMOOTHING = 0.04
# A page with more would take seconds to open.
MAX_CHARTS = 40


class PageChart(NamedTuple):
    """A chart of the page: its heading, its picture, and one sentence on how to read it."""

    title: str
    uri: str
    note: str


def curve_charts(groups: Sequence[Sequence[ReportedRun]]) -> tuple[list[PageChart], int]:
    """Return the charts of the metrics that have a value, and how many more there are.

    Runs of gputrain have those of loss, accuracy, learning rate and throughput, foreign runs one for each metric. The
    runs of a group differ in the seed alone.
    """
    runs = [run for group in groups for run in group]
    axis = default_axis(run.curves for run in runs)
    last = max(run.curves.last_x(axis) for run in runs)
    found = [(chart, chart_lines(chart, groups, axis, SMOOTHING, labels)) for chart, labels in _charts(runs)]
    known = [(chart, lines) for chart, lines in found if lines]
    drawn = []
    with drawing() as figure_class:
        for chart, lines in known[:MAX_CHARTS]:
            figure = figure_class(figsize=CHART_SIZE, layout="constrained")
            axes = figure.subplots()
            draw_lines(axes, lines, axis)
            axes.set_xlabel(X_LABELS[axis])
            # All charts have the same x axis, also if some curves begin later, unless their steps differ in kind.
            limits = [run.curves.odd_limits(map(run.curves.name_of, chart.metrics), axis) for run in runs]
            low, high = next(filter(None, limits), (0.0, last))
            axes.set_xlim(low - 0.02 * (high - low), high + 0.03 * (high - low))
            if chart.from_zero:
                axes.set_ylim(bottom=0)
            if len(groups) == 1 and len(lines) > 1:
                axes.legend(loc="best")
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", metadata=METADATA["svg"])
            is_averaged = any(line.raw is not None for line in lines)
            note = "Pale lines are all values, the lines on them their moving average." if is_averaged else ""
            drawn.append(PageChart(shortened(chart.title), data_uri("svg+xml", buffer.getvalue()), note))
    return drawn, max(len(known) - MAX_CHARTS, 0)


def _charts(runs: Sequence[ReportedRun]) -> Iterator[tuple[Chart, Mapping[str, str]]]:
    """Yield the charts of these runs, and names of metrics for their legends."""
    foreign = [run.curves for run in runs if not run.curves.is_own]
    if len(runs) > 1:
        charts = compared_charts([run.curves for run in runs], charts_of(Place.REPORT_OF_SEVERAL))
        yield from ((chart, {}) for chart in charts)
    elif not foreign:
        yield from ((chart, {}) for chart in charts_of(Place.REPORT_OF_ONE))
    else:
        # Training and validation share one chart, by the names of their metrics.
        keys = foreign[0].keys
        for chart in foreign_charts(foreign[0]):
            metrics = {keys[name]: source for name, source in chart.metrics.items() if name in keys}
            labels = {keys[name]: label for name, label in curve_labels(chart).items() if name in keys}
            yield replace(chart, metrics=metrics), labels
