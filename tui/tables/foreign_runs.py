"""The tables of runs that other programs have recorded: those of `gputrain watch`, and of the preview of one run."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rich.text import Text

from engine.foreign.activity import activity_text
from engine.runs.fields import Names, as_text, find_field
from engine.runs.foreign_record import by_importance
from engine.runs.metrics import HIGHEST_PREFIX, LOWEST_PREFIX, ODD_PREFIX, Better, Metric, format_metric, metric_of_key
from engine.runs.run_row import RunRow
from engine.show.table import Align, Column, FittedTable, cell_width, fit, pad, shorten
from engine.utils.text import printable
from engine.utils.units import UNKNOWN, format_age, format_count
from tui.palette import ACCENT, MUTED, STRONG
from tui.phrases import state_symbol
from tui.tables import styled
from tui.tables.runs import field_column

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


MetricRow = tuple[Metric, float | None, float | None]
"""A metric, its last value, and its best one, None without a direction."""
MIN_PARAMETER_COLUMNS, GAP_COLUMNS = 24, 3
MAX_NAME_COLUMNS = 32
METRIC_COLUMNS: list[Column[MetricRow]] = [
    Column("name", "metric", lambda row: row[0].label, max_width=MAX_NAME_COLUMNS),
    Column("last", "last", lambda row: _number(row[0], row[1]), Align.RIGHT, style=ACCENT),
    Column("best", "best", lambda row: "" if row[2] is None else _number(row[0], row[2]), Align.RIGHT),
]


def _number(metric: Metric, value: float | None) -> str:
    return UNKNOWN if value is None else format_metric(metric, value)


def preview_lines(row: RunRow, width: int, height: int) -> list[Text]:
    """Return what is known of a run in `height` lines: what it does, its metrics, and its parameters beside them."""
    record = row.record
    sign, style = state_symbol(row.shown_state)
    changed = "" if record.updated_at is None else f"changed {format_age(row.age_seconds)} ago"
    facts = [
        printable(", ".join(row.formats)),
        f"step {format_count(record.count('step'))}" if record.metric_keys else "",
        changed,
        row.message,
    ]
    head = Text.assemble(
        (f"{sign} {activity_text(row.shown_state, record.updated_at)}", style or STRONG), no_wrap=True, end=""
    )
    head.append("".join(f"   {fact}" for fact in facts if fact))
    place = Text(shorten(printable(row.folder), width), MUTED, no_wrap=True, end="")
    lines = [head, place, Text("")]
    room = max(height - len(lines), 0)
    metrics = _metric_lines(row, width, room)
    beside = width - max((line.cell_len for line in metrics), default=0) - GAP_COLUMNS
    if not metrics or beside < MIN_PARAMETER_COLUMNS:
        return [*lines, *metrics][:height]
    left = width - beside - GAP_COLUMNS
    for first, second in zip_longest(metrics, _parameter_lines(row, beside, room), fillvalue=Text("")):
        line = first.copy()
        line.truncate(left, pad=True)
        lines.append(Text.assemble(line, " " * GAP_COLUMNS, second, no_wrap=True, end=""))
    return lines[:height]


def _metric_lines(row: RunRow, width: int, room: int) -> list[Text]:
    record = row.record
    names = {key: name for name, key in record.metric_keys.items()}
    if not names or room < 2:
        return []
    bounds = {Better.LOW: LOWEST_PREFIX, Better.HIGH: HIGHEST_PREFIX, Better.NEITHER: "no."}
    shown: list[MetricRow] = []
    for key in by_importance(names)[: room - 1]:
        metric = metric_of_key(key)
        shown.append((metric, metric.of_run(record), record.values.get(bounds[metric.better] + names[key])))
    table: FittedTable[MetricRow] = fit(METRIC_COLUMNS, shown, width)
    return [styled(table.header(MUTED)), *(styled(table.line(metric)) for metric in shown)]


def parameter_text(value: Any) -> str:
    """Return the value of a parameter as lists and comparisons show it."""
    return "none" if value is None else as_text(value)


def _parameter_lines(row: RunRow, width: int, room: int) -> list[Text]:
    parameters = sorted(row.record.command_parameters.items())
    if not parameters:
        return [Text("no parameters found", MUTED)]
    more = len(parameters) - (room - 1)
    shown = parameters if more <= 0 else parameters[: room - 2]
    columns = min(max(cell_width(printable(key)) for key, _ in shown or parameters[:1]), width // 2)
    lines = [Text("parameter", MUTED)]
    for key, value in shown:
        text = shorten(printable(parameter_text(value)), width - columns - 2)
        name = pad(shorten(printable(key), columns), columns)
        lines.append(Text.assemble((name, MUTED), "  ", text, no_wrap=True, end=""))
    return lines if more <= 0 else [*lines, Text(f"+{more + 1} more", MUTED)]
