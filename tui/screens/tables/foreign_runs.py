"""The table of `gputrain watch`: runs that other programs have recorded."""

from __future__ import annotations

from typing import Any

from engine.base.units import UNKNOWN
from engine.report.table import Column
from engine.runs.fields import Names, as_text, find_field
from engine.runs.foreign_record import by_importance
from engine.runs.metrics import ODD_PREFIX, Metric, format_metric, metric_of_key
from engine.runs.run_row import RunRow
from tui.screens.tables.runs import field_column

MAX_SHOWN_METRICS = 4


def latest_values(row: RunRow) -> str:
    """Return the last values of the most important metrics, and how many more there are."""
    keys = by_importance(row.record.metric_keys.values())
    metrics = [metric_of_key(key) for key in keys[:MAX_SHOWN_METRICS]]
    shown = [f"{metric.label} {_last(row, metric)}" for metric in metrics]
    more = len(keys) - len(shown)
    return "  ".join([*shown, *([f"+{more}"] if more else [])])


def _last(row: RunRow, metric: Metric) -> str:
    """Return the last value of a metric, or since which step it is not finite."""
    values = row.record.values
    value, odd_step = values.get(metric.key), values.get(ODD_PREFIX + metric.key)
    return _number(metric, value) if value is not None or odd_step is None else f"NaN since {int(odd_step):,}"


def foreign_columns() -> list[Column[RunRow]]:
    """Return the columns of `gputrain watch`: those of a list, and the latest values."""
    names = Names(is_foreign=True)
    columns = [field_column(find_field(name, names)) for name in ("name", "state", "format", "step", "age")]
    return [*columns, Column("values", "last values", latest_values)]


def _number(metric: Metric, value: float | None) -> str:
    return UNKNOWN if value is None else format_metric(metric, value)


def parameter_text(value: Any) -> str:
    """Return the value of a parameter as lists and comparisons show it."""
    return "none" if value is None else as_text(value)
