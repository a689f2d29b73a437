"""What a page says of one foreign run, as text: the values of `page.html`. `sections` has those of our own runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from engine.report.runs import ReportedRun
from engine.report.sections import Table, short_name, value_text
from engine.runs.metrics import Metric, Taken, format_metric
from engine.show.table import Column
from engine.utils.units import format_utc

MAX_FIGURES, MAX_PARAMETERS = 100, 300
PARAMETER_COLUMNS: tuple[Column[tuple[str, Any]], ...] = (
    Column("key", "key", lambda parameter: short_name(parameter[0])),
    Column("value", "value", lambda parameter: value_text(parameter[1])),
)


def subtitle(run: ReportedRun) -> str:
    """Return which files the run was read from, and when they last changed, in one line."""
    parts = [f"{', '.join(run.compared.formats)} files in {run.compared.folder}"]
    if run.compared.record.updated_at:
        parts.append(f"last changed {format_utc(run.compared.record.updated_at)}")
    return ", ".join(parts)


def figures(run: ReportedRun, metrics: Iterable[Metric]) -> list[tuple[str, str]]:
    """Return the best and the last values, and the last step."""
    values = [(short_name(metric.label), metric, run.compared.value(metric)) for metric in metrics]
    known = [
        (label, format_metric(metric, value))
        for label, metric, value in values
        if value is not None and (metric.taken is not Taken.NOW or metric.key == "step")
    ]
    return known[:MAX_FIGURES]


def parameters(run: ReportedRun) -> Table[tuple[str, Any]]:
    """Return the parameters, sorted by key."""
    rows = sorted((run.compared.config or {}).items())
    return Table(PARAMETER_COLUMNS, rows[:MAX_PARAMETERS], len(rows) - MAX_PARAMETERS)


def notes(run: ReportedRun) -> Iterator[str]:
    """Yield what a reader should know before the figures."""
    if run.compared.problem is not None:
        yield run.compared.problem
    if count := run.curves.count_not_finite(run.curves.keys):
        yield f"{count:,} values are not finite; the curves have gaps there."
