"""A page of HTML about one run or several: everything is in one file, which loads nothing and runs no script.

`gputrain report` writes it. The template is `page.html`, its style sheet `page.css`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from engine.config.command_line import format_value
from engine.report import sections
from engine.report.charts import curve_charts
from engine.report.output import MARK
from engine.report.results import class_section
from engine.report.runs import OwnRun, ReportedRun, read_reported_run
from engine.report.sections import Table, short_name
from engine.report.style import COLORS, COMMAND, dashes
from engine.runs.comparison import Comparison, RunGroup, compare_runs, has_key, require_comparable, spread_text
from engine.runs.find import OpenedRun
from engine.runs.labels import NO_LABELS, read_labels
from engine.runs.metrics import NO_METRICS, Better, Metric
from engine.show.foreign_run import OnRead
from engine.show.table import Column
from engine.utils.libraries import import_library
from engine.utils.text import pluralize, printable
from engine.utils.units import UNKNOWN

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
    require_comparable(len(found))
    environment = _environment()
    runs = [read_reported_run(run, PAGE_COLUMNS, on_read) for run in found]
    comparison = compare_runs([run.row for run in runs], directions)
    columns = comparison.columns(grouped=True)
    charts, more_charts = curve_charts([[runs[run] for run in column.runs] for column in columns])
    letters = {run: letter for letter, column in zip(ascii_uppercase, columns, strict=False) for run in column.runs}
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
    shown = ", ".join(names[run] for run in column.runs)
    return {
        "letter": ascii_uppercase[index],
        "color": COLORS[index % len(COLORS)],
        "dashes": " ".join(f"{length * 1.5:g}" for length in dashes(index)),
        "text": f"mean ± standard deviation of {shown} (seeds)" if column.is_group else shown,
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
        Column("name", "run", lambda row: joined(comparison.runs[run].name for run in columns[row].runs)),
        Column("state", "state", lambda row: joined(comparison.runs[run].state for run in columns[row].runs)),
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
        return short_name(format_value(values[row]) or "none")

    heads = [Column[int]("name", "run", lambda row: comparison.runs[row].name)]
    heads += [Column(each.key, each.key, partial(cell, each.key, each.values)) for each in comparison.differences]
    return Table(heads, range(len(comparison.runs)))
