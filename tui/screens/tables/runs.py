"""The table of runs in the run list and in `gputrain runs`, and the lines of runs on the monitor.

`engine.runs.fields` knows the names, labels and values of the columns; this module makes cells of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from engine.base.text import printable
from engine.base.units import UNKNOWN, format_age, format_date, format_number, format_share
from engine.report.table import GAP, Align, Column, FittedTable, Line, Shorten, cell_width, fit, pad, shorten
from engine.runs.fields import Field, FieldKind, as_text, find_field
from engine.runs.folder import ENDED_BADLY, RunState
from engine.runs.metrics import METRICS, format_metric, metric_of_key
from engine.runs.monitor import record_monitor, shared_monitor
from engine.runs.run_record import DIVERGED
from engine.runs.run_row import RunRow
from engine.runs.run_view import SortOrder, commands_metrics
from engine.runs.trials import group_trials, make_sweep_row
from tui.charts.meter import meter
from tui.screens.phrases import (
    FOLD_SIGNS,
    FOREIGN_SIGN,
    MARK,
    epochs_text,
    keyed,
    note,
    result_text,
    short_command,
    state_style,
    state_symbol,
    when_text,
)
from tui.screens.tables import spans
from tui.terminal.palette import ACCENT, GOOD, MUTED, STRONG, WARNING

SORT_SIGNS = {False: "▴", True: "▾"}
"""Signs of the sorted column by whether the order is descending."""
# The mark, the symbol of the state and the sign of a foreign run or a sweep.
SIGN_COLUMNS = 3
NOTE_KEY = "note of the line"
MIN_NAME_COLUMNS, MIN_MESSAGE_COLUMNS, MAX_VALUE_COLUMNS = 10, 24, 20
# Below this width, the heading of the best value leaves room for that of the time.
SHORT_TITLES_WIDTH = 70
# The widths of values are those of as many runs, so that a list of 10,000 is not formatted for them.
MAX_MEASURED_RUNS = 200
DEFAULT_COLUMNS = (
    *("state", "epochs", "best", "age", "model.name", "data.dataset", "optim.lr", "optim.name"),
    *("global_batch", "seconds", "run.seed", "tags", "val_loss", "images_per_second"),
)
MIXED_PROGRESS = "progress"
"""Heading of the column that has epochs of trainings and steps of commands."""
NUM_FIRST_COLUMNS = 3
"""Number of the first default columns, which metrics of commands follow."""
# Cells that say more than the value of their field, with a least width where they change while a run trains.
SPECIAL_CELLS: dict[str, tuple[Callable[[RunRow], str], int]] = {
    "state": (lambda row: row.shown_state, 8),
    "epochs": (epochs_text, 6),
    "age": (when_text, 10),
    "command": (short_command, 0),
}
MIN_MONITOR_NAME_COLUMNS = 10
MAX_COMMAND_COLUMNS = 60
STATE_COLUMNS, EPOCHS_COLUMNS, TIME_COLUMNS, MIN_NOTE_COLUMNS = 8, 6, 10, 14
# From this width, a line of the monitor has a meter of the progress.
METER_MIN_WIDTH, METER_COLUMNS = 66, 8
# Where the note of a run that failed would get less, it takes the place of the figures.
MIN_CAUSE_COLUMNS = 40
MAX_MEASURED_MONITOR_RUNS = 50
RowTest = Callable[[RunRow], bool]


def field_column(field: Field) -> Column[RunRow]:
    """Return the column of a field."""
    text: tuple[Callable[[RunRow], str], int] = (partial(field_text, field), 0)
    # Other programs have parameters and metrics with these names, too.
    is_other = field.kind is FieldKind.PARAMETER or (field.metric is not None and field.metric.key != field.name)
    cell, width = text if is_other else SPECIAL_CELLS.get(field.name, text)
    align = Align.LEFT if field.is_text or field.name == "age" else Align.RIGHT
    style = state_style if field.name == "state" else ""
    return Column(field.name, field.label, cell, align, width, MAX_VALUE_COLUMNS, style=style)


def field_columns(fields: Iterable[Field], rows: Sequence[RunRow]) -> list[Column[RunRow]]:
    """Return the columns of fields. With commands, which have steps, and no epochs and no ETA, some have another
    heading."""
    commands = [bool(row.record.command) for row in rows]
    titles = {"epochs": MIXED_PROGRESS} if any(commands) else {}
    titles |= {"age": "age"} if commands and all(commands) else {}
    monitor = shared_monitor(row.record for row in rows)
    titles |= {"best": printable(monitor.label)} if monitor is not None else {}
    columns = [replace(each, title=titles.get(each.key, each.title)) for each in map(field_column, fields)]
    return [
        replace(each, cell=_named_best, align=Align.LEFT) if each.key == "best" and monitor is None else each
        for each in columns
    ]


def field_text(field: Field, row: RunRow) -> str:
    """Return the value of a field as text."""
    value = field.value(row)
    if value is None or value == ():
        return "" if field.kind is FieldKind.TAGS else UNKNOWN
    if field.metric is not None or field.name == "best":
        return format_metric(field.metric or record_monitor(row.record), value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.kind is FieldKind.DATE:
        return format_date(value)
    if field.kind is FieldKind.DURATION:
        return format_age(value)
    return format_number(value) if isinstance(value, float) else as_text(value)


def _listed_key(field: Field, rows: Sequence[RunRow], listed: Sequence[str]) -> str:
    """Return the key of the column that has the values of a field: `best` has those of the monitor of all runs."""
    monitor = shared_monitor(row.record for row in rows)
    is_best = monitor is not None and monitor.key == field.name and field.name not in listed
    return "best" if is_best else field.name


def _named_best(row: RunRow) -> str:
    """Return the best value of a run and its name, in a list of runs that are monitored by different metrics."""
    monitor = record_monitor(row.record)
    value = monitor.of_run(row.record)
    name = monitor.label.removeprefix("best ").removeprefix("lowest ")
    return UNKNOWN if value is None else f"{format_metric(monitor, value)} {printable(name)}"


def fit_run_list(
    rows: Sequence[RunRow],
    width: int,
    fields: Iterable[Field],
    order: SortOrder | None = None,
    *,
    is_marked: RowTest = lambda row: False,
    is_opened: RowTest = lambda row: False,
) -> FittedTable[RunRow]:
    """Return the table of the run list for lines of `width` cells. Columns that do not fit are dropped from the right.

    Long names get what the other columns leave, and the message what the names leave. `is_opened` tells whether the
    trials of a sweep are shown.
    """
    longest = max(rows, key=lambda row: cell_width(row.name)) if rows else None
    least = max(width // 4, MIN_NAME_COLUMNS)
    name_width = min(cell_width(printable(longest.name)), least) if longest is not None else 0
    name = Column(
        "name", " " * SIGN_COLUMNS + "name", partial(_name_cell, is_marked=is_marked, is_opened=is_opened),
        width=SIGN_COLUMNS + name_width, priority=1, flex=True, shorten=Shorten.MIDDLE,
    )  # fmt: skip
    # The field `message` can be one of the columns.
    message = Column(NOTE_KEY, "message", note, width=MIN_MESSAGE_COLUMNS, priority=-1, flex=True)
    columns = [name, *field_columns((field for field in fields if field.name != name.key), rows), message]
    if width < SHORT_TITLES_WIDTH:
        columns = [replace(column, title=column.title.removeprefix("best ")) for column in columns]
    if order is not None:
        sign, key = SORT_SIGNS[order.descending], _listed_key(order.field, rows, [column.key for column in columns])
        columns = [replace(column, title=column.title + sign) if column.key == key else column for column in columns]
    measured = list(rows[:: max(len(rows) // MAX_MEASURED_RUNS, 1)])
    measured += [make_sweep_row(trials) for trials in islice(group_trials(rows).values(), MAX_MEASURED_RUNS)]
    if longest is not None:
        measured.append(longest)
    return fit(columns, measured, width)


def run_list_line(table: FittedTable[RunRow], row: RunRow) -> Line:
    """Return the line of a run. Its message takes the rest of the line, also if it is longer than those measured.

    Without room for it, that of a run that failed takes the place of the figures."""
    key, columns = NOTE_KEY, [column.key for column in table.columns]
    if columns[-1] != NOTE_KEY and row.state in ENDED_BADLY and row.message:
        room = table.width - sum(table.widths) - len(GAP) * len(columns)
        while len(columns) > 1 and key != "best" and room < MIN_CAUSE_COLUMNS:
            key = columns.pop()
            room += table.widths[len(columns)] + len(GAP)
    return table.line(row, (key, ((note(row), WARNING if row.foreign else MUTED),)))


def _name_cell(row: RunRow, is_marked: RowTest, is_opened: RowTest = lambda row: False) -> Line:
    """Return mark, state and name. The sign before the name marks a run that other users can change, or a sweep."""
    marked = is_marked(row)
    if row.trials and not row.foreign:
        sign = (FOLD_SIGNS[is_opened(row)], MUTED)
    else:
        sign = (FOREIGN_SIGN if row.foreign else " ", WARNING)
    style = WARNING if row.foreign else ACCENT if marked else MUTED if row.archived else STRONG
    return (MARK if marked else " ", ACCENT), state_symbol(row.shown_state), sign, (row.name, style)


def listed_columns(rows: Sequence[RunRow], sorted_by: Field | None = None) -> list[Column[RunRow]]:
    """Return the columns of `gputrain runs` without `--columns`, with the field that the list is sorted by.

    Columns for tags, for why other users can change a run and for commands exist only if one of the runs has any, and a
    column for the cause only if every run ended with one. Commands without a validation accuracy add their most
    important metric.
    """
    names = ["name", "state", "epochs", "best", *commands_metrics(rows), "age"]
    if rows and all(row.record.command for row in rows):
        names[2] = "step"
        if all(record_monitor(row.record).of_run(row.record) is None for row in rows):
            names.remove("best")
    fields = {field.name: field for field in map(find_field, names)}
    if sorted_by is not None and _listed_key(sorted_by, rows, [*fields]) not in (*fields, "tags", "command"):
        age = fields.pop("age")
        fields |= {sorted_by.name: sorted_by, "age": age}
    columns = field_columns(fields.values(), rows)
    columns.append(replace(field_column(find_field("tags")), optional=True))
    columns.append(Column("foreign", "foreign", lambda row: row.foreign or "", optional=True))
    columns.append(Column("command", "command", _listed_command, optional=True))
    columns.append(Column("reason", "reason", lambda row: row.message if row.has_open_job else "", optional=True))
    if all(row.message and row.state in ENDED_BADLY for row in rows):
        columns.append(Column("cause", "cause", lambda row: row.message))
    return columns


def _listed_command(row: RunRow) -> str:
    return shorten(printable(short_command(row)), MAX_COMMAND_COLUMNS) if row.record.command else ""


def monitor_name_width(names: Iterable[str], width: int) -> int:
    """Return the width of the names on the monitor: that of the longest one that leaves room for the best value."""
    longest = max((cell_width(printable(name)) for name in names), default=0)
    limit = max(min(width * 3 // 10, width - 44), MIN_MONITOR_NAME_COLUMNS)
    return min(max(longest, MIN_MONITOR_NAME_COLUMNS), limit)


def fit_monitor_list(
    rows: Sequence[RunRow], name_width: int, width: int, is_marked: RowTest = lambda row: False
) -> FittedTable[RunRow]:
    """Return the table of the runs on the monitor, which has no titles, for lines of `width` cells."""
    meter_columns = METER_COLUMNS if width >= METER_MIN_WIDTH else 0
    measured = rows[:: max(len(rows) // MAX_MEASURED_MONITOR_RUNS, 1)]
    columns = [
        Column("name", "", partial(_name_cell, is_marked=is_marked), width=SIGN_COLUMNS + name_width,
               max_width=SIGN_COLUMNS + name_width, shorten=Shorten.MIDDLE),
        Column("progress", "", partial(_progress_cell, meter_columns=meter_columns),
               width=meter_columns + STATE_COLUMNS),
        Column("epochs", "", epochs_text, width=EPOCHS_COLUMNS, priority=-2),
        Column("best", "", _best_cell, priority=-1),
        Column("age", "", when_text, width=TIME_COLUMNS, style=lambda row: "" if row.live else MUTED),
        Column("note", "", lambda row: "", width=MIN_NOTE_COLUMNS, priority=-3),
    ]  # fmt: skip
    # A label is worth more than the note and the epochs, and the value alone more than its label, unless it is another
    # metric than that of most runs.
    for cut, least in (("", len(columns)), ("best ", len(columns) - 2), (METRICS["best_val_accuracy"].label, 0)):
        columns[3] = replace(columns[3], cell=partial(_best_cell, cut=cut))
        table = fit(columns, measured, width)
        if len(table.columns) >= least:
            break
    return table


def monitor_line(table: FittedTable[RunRow], row: RunRow) -> Line:
    """Return a line with state, name, progress, best value, ETA or age, and what must be known of it.

    What a run waits for, and why it failed where there is no room beside the figures, takes their place.
    """
    message = keyed(row.message)
    if row.trials and row.live:
        return table.line(row, ("progress", ((message, ""), ("  ", ""), *_best_cell(row))))
    if (row.live or row.state == RunState.INTERRUPTED) and message:
        if row.state in (RunState.WAITING, RunState.INTERRUPTED):
            return table.line(row, ("progress", ((f"{row.state}  ", ""), (message, MUTED))))
        return table.line(row, ("progress", ((message, WARNING),)))
    note_width = table.width - sum(table.widths[:-1]) - len(GAP) * (len(table.widths) - 1)
    has_room = table.columns[-1].key == "note" and note_width >= MIN_CAUSE_COLUMNS
    if row.state in ENDED_BADLY and message and not has_room:
        state = (pad(row.state, STATE_COLUMNS) + GAP, state_style(row))
        return table.line(row, ("progress", (state, (message, MUTED))))
    # Of a run that finished, the result is in its column.
    has_note = not row.live and row.shown_state != RunState.FINISHED
    notes = ((row.foreign or "", WARNING), (result_text(row) if has_note else "", MUTED))
    known = [((keyed(text), style), (GAP, "")) for text, style in notes if text]
    return table.line(row, ("note", tuple(span for pair in known for span in pair)[:-1]))


def _progress_cell(row: RunRow, meter_columns: int) -> Line:
    """Return how far a run that trains is, with a meter, else its state."""
    steps = row.record.count("steps")
    if row.state != RunState.RUNNING or not steps:
        return ((row.shown_state, state_style(row) if row.shown_state in (*ENDED_BADLY, DIVERGED) else ""),)
    share = row.record.count("step") / steps
    percent = format_share(share)
    bar = meter(share, meter_columns, GOOD)
    return (*spans(bar), (f" {percent}", "")) if meter_columns else ((percent, ""),)


def _best_cell(row: RunRow, *, cut: str = "") -> Line:
    metric = record_monitor(row.record)
    if row.record.command and metric.of_run(row.record) is None:
        if not (keys := commands_metrics([row])):
            return ()
        metric = metric_of_key(keys[0])
    value = metric.of_run(row.record)
    text = (UNKNOWN if value is None else format_metric(metric, value), "")
    label = printable(metric.label).removeprefix(cut)
    return ((f"{label} ", MUTED), text) if label else (text,)
