"""The queue of runs that wait for GPUs as text, for `gputrain queue`, the monitor and the queue screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from engine.queue.listing import QueueRow, RowState
from engine.utils.text import pluralize, printable
from tui.palette import BAD, GOOD, MUTED, STRONG, WARNING
from tui.text.run_lines import fit_cells, fit_middle
from tui.text.runs import format_duration
from tui.text.tables import UNKNOWN, format_table

HEADER = ("#", "NAME", "USER", "STATE", "GPUS", "PRIORITY", "WAITS", "REASON")


def format_queue_table(rows: Sequence[QueueRow]) -> str:
    """Return the table of `gputrain queue`."""
    return "\n".join(format_table([HEADER, *map(row_cells, rows)], right_aligned=(0, 5, 6)))


def row_cells(row: QueueRow) -> tuple[str, ...]:
    """Return the cells for `HEADER`, with control characters escaped."""
    cells = (
        UNKNOWN if row.place is None else str(row.place),
        row.name,
        row.user or UNKNOWN,
        row.state,
        gpus_cell(row),
        str(row.priority),
        format_duration(row.waited_s),
        row.reason,
    )
    return tuple(printable(cell) for cell in cells)


def gpus_cell(row: QueueRow) -> str:
    """Return `device.gpus`, with the number of runs that may share them."""
    shared = f" /{row.share}" if row.share > 1 else ""
    return f"{row.gpus}{shared}" if row.gpus and row.state is not RowState.INTERRUPTED else UNKNOWN


STATE_STYLES = {
    RowState.WAITING: ("◌", WARNING),
    RowState.HELD: ("‖", MUTED),
    RowState.DEPENDENT: ("…", MUTED),
    RowState.INTERRUPTED: ("✗", BAD),
}
MIN_NAME_COLUMNS, MAX_NAME_COLUMNS = 8, 32
# From this width, a line has its user, its GPUs and its priority.
WIDE_COLUMNS = 100


@dataclass(frozen=True)
class QueueLines:
    """The lines of the queue in a list of `width` columns; the reason gets what the other columns leave."""

    name_columns: int
    user_columns: int
    width: int

    @classmethod
    def fit(cls, rows: Sequence[QueueRow], width: int) -> QueueLines:
        longest = max((cell_len(printable(row.name)) for row in rows), default=0)
        users = max((cell_len(printable(row.user)) for row in rows), default=0)
        return cls(
            min(max(longest, MIN_NAME_COLUMNS), MAX_NAME_COLUMNS, max(width // 4, 1)), min(max(users, 4), 12), width
        )

    @property
    def header(self) -> Text:
        cells = [" #  " + "name".ljust(self.name_columns), "state      "]
        if self.width >= WIDE_COLUMNS:
            cells += ["user".ljust(self.user_columns), "gpus      ", "priority"]
        return Text("  ".join([*cells, "  waits", "reason"]), MUTED, no_wrap=True, end="")

    def line(self, row: QueueRow) -> Text:
        sign, style = STATE_STYLES[row.state]
        line = Text(no_wrap=True, end="", overflow="ellipsis")
        line.append(f"{'' if row.place is None else row.place:>2}", MUTED).append(f"{sign} ", style)
        line.append(fit_middle(printable(row.name), self.name_columns), STRONG if row.is_own else "")
        line.append(f"  {row.state:<11}", style)
        if self.width >= WIDE_COLUMNS:
            line.append("  " + fit_cells(printable(row.user), self.user_columns), GOOD if row.is_own else "")
            line.append(f"  {fit_cells(printable(gpus_cell(row)), 10)}  {row.priority:>8}")
        line.append(f"  {format_duration(row.waited_s):>7}  ")
        line.append(printable(row.reason), MUTED)
        line.truncate(self.width, overflow="ellipsis")
        return line


def queue_status_line(rows: Sequence[QueueRow]) -> Text:
    """Return how many runs wait, and how many of them are this user's."""
    waiting = [row for row in rows if row.state is RowState.WAITING]
    own = sum(row.is_own for row in rows)
    parts = [f"{pluralize(len(waiting), 'run')} waiting for GPUs", f"{own} of yours listed"]
    interrupted = sum(not row.is_live for row in rows)
    parts += [f"{interrupted} interrupted (u starts {'it' if interrupted == 1 else 'them'})"] if interrupted else []
    return Text(" " + ", ".join(parts), WARNING if interrupted else MUTED, no_wrap=True, end="", overflow="ellipsis")


def describe_row(row: QueueRow) -> str:
    """Return everything that the line of a run may cut off: its reason, and how it is ordered."""
    details = [f"--gpus {row.gpus}" if row.gpus else "", f"priority {row.priority}" if row.is_own else ""]
    details += [f"up to {row.share} runs per GPU" if row.share > 1 else ""]
    return printable(f"{row.name} ({row.user}): {row.reason}" + "".join(f"; {part}" for part in details if part))
