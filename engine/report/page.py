"""A page of HTML about one run or several: everything is in one file, which loads nothing and runs no script.

`gputrain report` writes it. The template is `page.html`, its style sheet `page.css`.
"""

from __future__ import annotations

import io
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from engine.base.libraries import import_library
from engine.base.text import pluralize, printable
from engine.base.units import UNKNOWN
from engine.config.command_line import format_value
from engine.report import sections
from engine.report.charts import (
    Chart,
    Place,
    charts_of,
    charts_without_accuracy,
    compared_charts,
    curve_labels,
    foreign_charts,
)
from engine.report.foreign_run import OnRead
from engine.report.lines import (
    COLORS,
    COMMAND,
    OwnRun,
    ReportedRun,
    chart_lines,
    dashes,
    draw_lines,
    drawing,
    read_reported_run,
    shortened,
)
from engine.report.plot import MARK, METADATA, X_LABELS
from engine.report.sections import Table, class_section, data_uri
from engine.report.table import Column
from engine.runs.comparison import (
    MAX_REPORTED_RUNS,
    Comparison,
    RunGroup,
    compare_runs,
    has_key,
    require_comparable,
    spread_text,
)
from engine.runs.curves import default_axis
from engine.runs.find import OpenedRun
from engine.runs.labels import NO_LABELS, read_labels
from engine.runs.metrics import NO_METRICS, Better, Metric

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
        charts = [*charts_of(Place.REPORT_OF_ONE), *charts_without_accuracy(runs[0].curves)]
        yield from ((chart, {}) for chart in charts)
    else:
        # Training and validation share one chart, by the names of their metrics.
        keys = foreign[0].keys
        for chart in foreign_charts(foreign[0]):
            metrics = {keys[name]: source for name, source in chart.metrics.items() if name in keys}
            labels = {keys[name]: label for name, label in curve_labels(chart).items() if name in keys}
            yield replace(chart, metrics=metrics), labels


TEMPLATE, STYLE_SHEET = "page.html", "page.css"
# Twice the points of a chart, which is 340 points wide.
PAGE_COLUMNS = 700
MAX_TITLE_RUNS = 3


def make_page(
    found: Sequence[OpenedRun],
    directions: Mapping[str, Better] = NO_METRICS,
    on_read: OnRead | None = None,
) -> str:
    """Return the page about these runs. The same files give the same page.

    `directions` are the stored directions of the user's own metrics. `on_read` is called while a foreign run is read.

    Raises UsageError if there are too many runs, or if matplotlib or jinja2 is not installed.
    """
    require_comparable(len(found), MAX_REPORTED_RUNS)
    environment = _environment()
    runs = [read_reported_run(run, PAGE_COLUMNS, on_read) for run in found]
    comparison = compare_runs([run.row for run in runs], directions)
    columns = comparison.columns(grouped=True)
    charts, more_charts = curve_charts([[runs[run] for run in column] for column in columns])
    letters = {run: letter for letter, column in zip(ascii_uppercase, columns, strict=False) for run in column}
    names = [run.row.name for run in runs]
    page: str = environment.get_template(TEMPLATE).render(
        title=", ".join(names) if len(names) <= MAX_TITLE_RUNS else pluralize(len(names), "run"),
        mark=MARK,
        style=(Path(__file__).parent / STYLE_SHEET).read_text(encoding="utf-8"),
        version=version("gputrain"),
        runs=[
            {"anchor": f"r{number}", "letter": letters[number], **_view(run, comparison.metrics)}
            for number, run in enumerate(runs)
        ],
        charts=charts,
        more_charts=more_charts,
        legend=[_legend_entry(names, column, index) for index, column in enumerate(columns)],
        metrics=metric_table(comparison, columns),
        differences=difference_table(comparison),
        notes=tuple(map(str, comparison.notes)) if len(runs) > 1 else (),
        has_configs=any(isinstance(run, OwnRun) for run in runs),
        has_groups=bool(comparison.seed_groups),
    )
    return page


def _environment() -> Any:
    jinja2 = import_library("jinja2", COMMAND)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        # What a run names may hold control characters, or reverse the direction of the text around it.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["svg"] = jinja2.utils.markupsafe.Markup
    return environment


def _view(run: ReportedRun, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return what the page says of one run. `own` is what only a run of gputrain has."""
    labels, own = NO_LABELS, None
    if isinstance(run, OwnRun):
        labels, bottleneck = read_labels(run.folder), run.history.bottleneck
        own = {
            "bottleneck": "" if bottleneck is None else bottleneck.message,
            "hardware": sections.hardware(run),
            "classes": class_section(run),
            "command": sections.repeat_command(run),
        }
    return {
        "name": run.row.name,
        "state": sections.state_text(run) if isinstance(run, OwnRun) else run.row.state,
        "is_good": own is None or run.row.state in ("finished", "running"),
        "subtitle": sections.subtitle(run),
        "tags": labels.tags,
        "note": labels.note,
        "notes": tuple(sections.notes(run)),
        "figures": sections.figures(run, metrics),
        "changes": sections.config_changes(run),
        "own": own,
    }


def _legend_entry(names: Sequence[str], column: RunGroup, index: int) -> dict[str, str]:
    """Return a line of the charts: letter, color, dashes as SVG has them, and what it shows."""
    shown = ", ".join(names[run] for run in column)
    return {
        "letter": ascii_uppercase[index],
        "color": COLORS[index % len(COLORS)],
        "dashes": " ".join(f"{length * 1.5:g}" for length in dashes(index)),
        "text": f"mean ± standard deviation of {shown} (seeds)" if len(column) > 1 else shown,
    }


def metric_table(comparison: Comparison, columns: Sequence[RunGroup]) -> Table[int]:
    """Return the metrics of runs side by side: a row for each group, with the best value of each column set off.

    A row is the index of its group in `columns`.
    """

    def cell(metric: Metric, best: Container[int], row: int) -> str:
        value = comparison.value(columns[row], metric)
        text = UNKNOWN if value is None else spread_text(metric, value)
        return f"{text} ★" if row in best else text

    def joined(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    heads = [
        Column[int]("letter", "", lambda row: ascii_uppercase[row]),
        Column("name", "run", lambda row: joined(comparison.runs[run].name for run in columns[row])),
        Column("state", "state", lambda row: joined(comparison.runs[run].state for run in columns[row])),
    ]
    heads += [
        Column(metric.key, metric.label, partial(cell, metric, comparison.best_columns(columns, metric)))
        for metric in comparison.shown_metrics
    ]
    return Table(heads, range(len(columns)))


def difference_table(comparison: Comparison) -> Table[int]:
    """Return the config keys that differ, with a row for each run. A row is the index of its run."""

    def cell(key: str, values: Sequence[object], row: int) -> str:
        if not has_key(comparison.runs[row], key):
            return UNKNOWN
        return shortened(format_value(values[row]) or "none")

    heads = [Column[int]("name", "run", lambda row: comparison.runs[row].name)]
    heads += [Column(each.key, each.key, partial(cell, each.key, each.values)) for each in comparison.differences]
    return Table(heads, range(len(comparison.runs)))
