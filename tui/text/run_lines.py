"""Runs as table lines for the monitor and the run list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from engine.runs.folder import RunState
from engine.runs.run_row import RunRow
from engine.utils.text import printable
from tui.charts.meter import meter
from tui.palette import BAD, GOOD, MUTED, STRONG, WARNING
from tui.text.runs import format_accuracy, format_age, format_duration
from tui.text.tables import UNKNOWN, shorten_middle

# Symbol and style of each state; screens print the state's name next to them.
STATE_SYMBOLS = {
    RunState.STARTING: ("◌", WARNING),
    RunState.RUNNING: ("●", GOOD),
    RunState.PAUSED: ("‖", WARNING),
    RunState.STOPPING: ("◍", WARNING),
    RunState.FINISHED: ("○", ""),
    RunState.STOPPED: ("■", MUTED),
    RunState.FAILED: ("✗", BAD),
    RunState.CRASHED: ("✗", BAD),
}
MIN_NAME_COLUMNS, MAX_NAME_COLUMNS = 10, 32
ENDED_BADLY = (RunState.FAILED, RunState.CRASHED)
STATE_COLUMNS, TIME_COLUMNS = 8, 10
# From this width, a line has a meter of the progress.
METER_MIN_WIDTH, METER_COLUMNS = 66, 8
MIN_NOTE_COLUMNS = 14


def state_symbol(state: str) -> tuple[str, str]:
    """Return the symbol and style of a run state."""
    return STATE_SYMBOLS[RunState(state)]


def name_columns(names: Sequence[str], width: int) -> int:
    """Return the width of the name column: the longest name within limits."""
    longest = max((cell_len(printable(name)) for name in names), default=0)
    return min(max(longest, MIN_NAME_COLUMNS), MAX_NAME_COLUMNS, max(width - 44, MIN_NAME_COLUMNS))


def run_line(row: RunRow, name_width: int, width: int) -> Text:
    """Return a line with state, name, progress, best validation accuracy, ETA or age, and what must be known of it."""
    sign, style = state_symbol(row.state)
    line = Text(no_wrap=True, end="")
    line.append(f"{sign} ", style)
    line.append(fit_middle(printable(row.name), name_width), MUTED if row.foreign else "")
    line.append("  ")
    if row.state == RunState.STARTING and row.message:
        return line.append(printable(row.message), WARNING)
    line.append_text(_progress(row, METER_COLUMNS if width >= METER_MIN_WIDTH else 0)).append("  ")
    line.append(f"{row.epoch}/{row.epochs or '?'}".ljust(6))
    if width - line.cell_len >= len("  acc 0.1234  ") + TIME_COLUMNS:
        line.append("  acc ", MUTED).append(f"{format_accuracy(row.best_val_accuracy):<6}")
    line.append("  ")
    if row.live:
        line.append(f"{'' if row.eta_seconds is None else f'ETA {format_duration(row.eta_seconds)}':<{TIME_COLUMNS}}")
    else:
        line.append(f"{format_age(row.age_seconds)} ago".ljust(TIME_COLUMNS), MUTED)
    for note, note_style in ((row.foreign, WARNING), ("" if row.live else row.message, MUTED)):
        if note and width - line.cell_len >= MIN_NOTE_COLUMNS:
            line.append("  ").append(printable(note), note_style)
    return line


def _progress(row: RunRow, meter_columns: int) -> Text:
    """Return how far a run that trains is, with a meter of `meter_columns`, else its state, in the same width."""
    columns = meter_columns + STATE_COLUMNS
    if row.state != RunState.RUNNING or not row.steps:
        return Text(f"{row.state:<{columns}}", state_symbol(row.state)[1] if row.state in ENDED_BADLY else "")
    share = row.step / row.steps
    percent = f"{int(100 * share)}%"
    bar = meter(share, meter_columns, GOOD)
    return Text.assemble(bar, f" {percent:<{STATE_COLUMNS - 1}}" if meter_columns else f"{percent:<{STATE_COLUMNS}}")


MIN_MESSAGE_COLUMNS = 24
MIN_TABLE_NAME_COLUMNS = 20
FOREIGN_SIGN = "!"


@dataclass(frozen=True)
class Column:
    """A column of the run list. Where the list is narrow, the columns of low `priority` are omitted."""

    title: str
    width: int
    priority: int
    cell: Callable[[RunRow], str]
    right: bool = True


def _when(row: RunRow) -> str:
    if row.live:
        return "" if row.eta_seconds is None else f"in {format_duration(row.eta_seconds)}"
    return f"{format_age(row.age_seconds)} ago"


COLUMNS = (
    Column("STATE", 10, 6, lambda row: "unreadable" if row.unreadable else row.state, right=False),
    Column("EPOCH", 7, 4, lambda row: f"{row.epoch}/{row.epochs or '?'}"),
    Column("BEST ACC", 8, 5, lambda row: format_accuracy(row.best_val_accuracy)),
    Column("VAL LOSS", 8, 1, lambda row: UNKNOWN if row.val_loss is None else f"{row.val_loss:.4f}"),
    Column("IMAGES/S", 8, 2, lambda row: UNKNOWN if row.images_per_second is None else f"{row.images_per_second:,.0f}"),
    Column("ETA OR AGE", 10, 3, _when, right=False),
)


@dataclass(frozen=True)
class RunTable:
    """The columns of the run list that fit: the name, then `columns`, then the message in the remaining columns."""

    name_columns: int
    columns: tuple[Column, ...]
    message_columns: int

    @classmethod
    def fit(cls, rows: Sequence[RunRow], width: int, *, with_message: bool) -> RunTable:
        """Return the table for lines of `width` columns. Long names get what the other columns leave."""
        longest = max((cell_len(printable(row.name)) for row in rows), default=0)
        longest = max(longest, len("NAME"))
        # Two columns are the signs before the name.
        room = width - 2 - min(longest, MIN_TABLE_NAME_COLUMNS)
        chosen = set()
        for column in sorted(COLUMNS, key=lambda column: -column.priority):
            if (room := room - column.width - 2) < 0:
                break
            chosen.add(column)
        columns = tuple(column for column in COLUMNS if column in chosen)
        free = width - 2 - sum(column.width + 2 for column in columns)
        name = max(min(longest, free), 1)
        message = free - name - 2 if with_message and free - name - 2 >= MIN_MESSAGE_COLUMNS else 0
        return cls(name, columns, message)

    @property
    def header(self) -> Text:
        cells = [column.title.rjust(column.width) if column.right else column.title for column in self.columns]
        padded = [cell.ljust(column.width) for cell, column in zip(cells, self.columns, strict=True)]
        line = "  ".join(
            ["  " + fit_cells("NAME", self.name_columns), *padded, *["MESSAGE"] * bool(self.message_columns)]
        )
        return Text(line.lower(), MUTED, no_wrap=True, end="")

    def line(self, row: RunRow) -> Text:
        """Return the line of a run. The sign before its name marks a run that other users can change."""
        sign, style = state_symbol(row.state)
        line = Text(no_wrap=True, end="")
        line.append(sign, style)
        line.append(FOREIGN_SIGN if row.foreign else " ", WARNING)
        line.append(fit_middle(printable(row.name), self.name_columns), WARNING if row.foreign else STRONG)
        for column in self.columns:
            cell = column.cell(row)
            text = cell.rjust(column.width) if column.right else cell.ljust(column.width)
            line.append("  " + text, style if column.title == "STATE" else "")
        if self.message_columns:
            line.append("  " + note(row), WARNING if row.foreign else MUTED)
        return line


def note(row: RunRow) -> str:
    """Return why other users can change the run, how it ended, and why it trained on the CPU, as far as known."""
    parts = (f"This run {row.foreign}" if row.foreign else "", row.message, row.cpu_fallback)
    return printable("; ".join(part for part in parts if part))


def fit_middle(text: str, width: int) -> str:
    """Pad or shorten in the middle to `width` terminal cells."""
    return set_cell_size(shorten_middle(text, width), width)


def fit_cells(text: str, width: int) -> str:
    """Pad or truncate to exactly `width` terminal cells, with an ellipsis if truncated."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
