"""The table of runs: which columns fit, their header and their cells.

`engine.runs.fields` knows the names and values of columns; this module makes text of them. `tui.screens.runs` draws
the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.cells import cell_len
from rich.text import Text

from engine.runs.fields import Field, Kind
from engine.runs.query import SortOrder
from engine.runs.run_row import RunRow
from engine.runs.trials import group_trials, make_sweep_row
from engine.utils.text import printable
from tui.palette import ACCENT, MUTED, STRONG, WARNING
from tui.text.run_lines import FOREIGN_SIGN, MARK, SWEEP_SIGN, fit_cells, fit_middle, note, state_symbol
from tui.text.runs import format_age, format_cell, format_duration, format_epoch

SORT_SIGNS = {False: "▴", True: "▾"}
"""Signs of the sorted column by whether the order is descending."""
FOLD_SIGNS = {False: SWEEP_SIGN, True: "▾"}
"""Signs of a sweep by whether its trials are shown."""
GAP = "  "
# The mark, the symbol of the state and the sign of a foreign run.
SIGN_COLUMNS = 3
MIN_NAME_COLUMNS, MIN_MESSAGE_COLUMNS = 20, 24
# A column without a width of its own is as wide as its values, up to this.
MAX_VALUE_COLUMNS = 20
# The widths of values are those of as many runs, so that a list of 10,000 is not formatted for them.
MAX_MEASURED_RUNS = 200
DEFAULT_COLUMNS = (
    *("state", "epochs", "best_val_accuracy", "age", "model.name", "data.dataset", "optim.lr", "optim.name"),
    *("global_batch", "seconds", "run.seed", "tags", "val_loss", "images_per_second"),
)
# Of these names, the last part says too little or too much.
TITLES = {
    "age": "eta or age", "started_at": "started", "updated_at": "updated", "model.name": "model",
    "optim.name": "optimizer", "schedule.name": "schedule", "data.batch_size": "batch/rank",
}  # fmt: skip
# Columns of numbers that grow while a run trains have a least width.
WIDTHS = {"state": 10, "epochs": 7, "age": 10, "images_per_second": 8, "seconds": 6}
LEFT_ALIGNED = {"state", "age", "model.name", "data.dataset", "optim.name"}
TEXT_KINDS = {Kind.TEXT, Kind.TAGS}


@dataclass(frozen=True)
class Column:
    """A column of the table. It is as wide as its values, and at least `width`."""

    name: str
    title: str
    cell: Callable[[RunRow], str]
    width: int
    right: bool


def _when(row: RunRow) -> str:
    if row.live:
        return "" if row.record.eta_seconds is None else f"in {format_duration(row.record.eta_seconds)}"
    return f"{format_age(row.age_seconds)} ago"


# Cells that say more than the value.
CELLS: Mapping[str, Callable[[RunRow], str]] = {
    "state": lambda row: "unreadable" if row.unreadable else row.state,
    "epochs": format_epoch,
    "age": _when,
}


def column_of(field: Field) -> Column:
    """Return the column of a field."""
    name = field.name
    if field.metric is not None:
        title = printable(field.metric.short_label)
    else:
        title = TITLES.get(name) or name.rpartition(".")[2].replace("_", " ")
    cell = CELLS.get(name) or (lambda row: format_cell(field, row))
    left = name in LEFT_ALIGNED or field.kind in TEXT_KINDS
    return Column(name, title, cell, WIDTHS.get(name, 0), right=not left)


@dataclass(frozen=True)
class FittedColumn:
    """A column with the width that it has, and its title with the sign of the order."""

    column: Column
    title: str
    width: int

    def pad(self, text: str) -> str:
        """Pad or shorten a text to the width."""
        if cell_len(text) > self.width:
            return fit_cells(text, self.width)
        room = " " * (self.width - cell_len(text))
        return room + text if self.column.right else text + room


@dataclass(frozen=True)
class RunTable:
    """The columns that fit: the name, then `columns`, then the message in the remaining columns."""

    name_title: str
    name_columns: int
    columns: tuple[FittedColumn, ...]
    message_columns: int

    @classmethod
    def fit(
        cls,
        rows: Sequence[RunRow],
        width: int,
        fields: Iterable[Field],
        order: SortOrder | None = None,
        *,
        with_message: bool = False,
    ) -> RunTable:
        """Return the table for lines of `width` columns. Columns that do not fit are dropped from the right.

        Long names get what the other columns leave.
        """

        def title_of(name: str, title: str) -> str:
            return title + SORT_SIGNS[order.descending] if order is not None and order.field.name == name else title

        name_title = title_of("name", "name")
        longest = max(max((_columns(row.name) for row in rows), default=0), len(name_title))
        room = width - SIGN_COLUMNS - min(longest, MIN_NAME_COLUMNS)
        sweeps = [make_sweep_row(trials) for trials in islice(group_trials(rows).values(), MAX_MEASURED_RUNS)]
        measured = [*rows[:: max(len(rows) // MAX_MEASURED_RUNS, 1)], *sweeps]
        columns = []
        for field in fields:
            column = column_of(field)
            title = title_of(field.name, column.title)
            fitted = FittedColumn(column, title, max(column.width, _value_columns(measured, column), len(title)))
            if (room := room - fitted.width - len(GAP)) < 0:
                break
            columns.append(fitted)
        free = width - SIGN_COLUMNS - sum(column.width + len(GAP) for column in columns)
        name = max(min(longest, free), 1)
        message = free - name - len(GAP)
        shown = with_message and message >= MIN_MESSAGE_COLUMNS
        return cls(name_title, name, tuple(columns), message if shown else 0)

    @property
    def header(self) -> Text:
        """The line with the titles."""
        line = Text(" " * SIGN_COLUMNS + fit_cells(self.name_title, self.name_columns), MUTED, no_wrap=True, end="")
        for fitted in self.columns:
            line.append(GAP + fitted.pad(fitted.title))
        return line.append(GAP + "message" if self.message_columns else "")

    def line(self, row: RunRow, *, marked: bool = False, opened: bool = False) -> Text:
        """Return the line of a run. The sign before its name marks a run that other users can change, or a sweep."""
        sign, style = state_symbol(row.state)
        line = Text(no_wrap=True, end="")
        line.append(MARK if marked else " ", ACCENT).append(sign, style)
        if row.trials and not row.foreign:
            line.append(FOLD_SIGNS[opened], MUTED)
        else:
            line.append(FOREIGN_SIGN if row.foreign else " ", WARNING)
        name_style = WARNING if row.foreign else ACCENT if marked else MUTED if row.archived else STRONG
        line.append(fit_middle(printable(row.name), self.name_columns), name_style)
        for fitted in self.columns:
            line.append(GAP + fitted.pad(fitted.column.cell(row)), style if fitted.column.name == "state" else "")
        if self.message_columns:
            line.append(GAP + note(row), WARNING if row.foreign else MUTED)
        return line


def _columns(name: str) -> int:
    """Return the terminal cells of a name."""
    return len(name) if name.isascii() and name.isprintable() else cell_len(printable(name))


def _value_columns(rows: Sequence[RunRow], column: Column) -> int:
    """Return the width of the widest cell, within the limit."""
    return min(max((cell_len(cell) for cell in {column.cell(row) for row in rows}), default=0), MAX_VALUE_COLUMNS)
