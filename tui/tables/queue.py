"""The queue of runs that wait for GPUs, for `gputrain queue`, the monitor and the queue screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from engine.queue.listing import QueueRow, RowState
from engine.show.table import Align, Column, FittedTable, Shorten, fit, pad
from engine.utils.text import pluralize, printable
from engine.utils.units import UNKNOWN, format_bytes, format_duration
from tui.palette import BAD, GOOD, MUTED, STRONG, WARNING

STATE_STYLES = {
    RowState.WAITING: ("◌", WARNING),
    RowState.HELD: ("‖", MUTED),
    RowState.DEPENDENT: ("…", MUTED),
    RowState.SCHEDULED: ("…", MUTED),
    RowState.LIMITED: ("…", MUTED),
    RowState.INTERRUPTED: ("✗", BAD),
}
PLACE: Column[QueueRow] = Column("place", "#", lambda row: place_cell(row), Align.RIGHT)
PLACE_AND_SIGN: Column[QueueRow] = Column(
    "place", "#  ", lambda row: ((f"{place_cell(row)} ", MUTED), STATE_STYLES[row.state]), Align.RIGHT, priority=2
)
COLUMNS: tuple[Column[QueueRow], ...] = (
    Column("name", "name", lambda row: row.name, width=12, max_width=32, priority=2, flex=True,
           style=lambda row: STRONG if row.is_own else "", shorten=Shorten.MIDDLE),
    Column("user", "user", lambda row: row.user or UNKNOWN, width=4, max_width=12,
           style=lambda row: GOOD if row.is_own else ""),
    Column("state", "state", lambda row: row.state, priority=2, style=lambda row: STATE_STYLES[row.state][1]),
    Column("gpus", "gpus", lambda row: gpus_cell(row)),
    Column("priority", "priority", lambda row: str(row.priority), Align.RIGHT),
    Column("waits", "waits", lambda row: format_duration(row.waited_s), Align.RIGHT, priority=1),
    Column("reason", "reason", lambda row: row.reason, width=16, priority=2, flex=True, style=MUTED),
)  # fmt: skip
# The command prints all cells in full.
PLAIN_COLUMNS = (PLACE, *COLUMNS)


def queue_table(rows: Sequence[QueueRow], width: int) -> FittedTable[QueueRow]:
    """Return the table of the queue screen."""
    return fit((PLACE_AND_SIGN, *COLUMNS), rows, width)


def place_cell(row: QueueRow) -> str:
    """Return the place among the runs that wait for GPUs only."""
    return UNKNOWN if row.place is None else str(row.place)


def gpus_cell(row: QueueRow) -> str:
    """Return `device.gpus`, with the number of runs that may share them, and the memory that it reserves of each."""
    shared = f" /{row.share}" if row.share > 1 else ""
    shared += f" {format_bytes(row.min_free)}" if row.min_free else ""
    return f"{row.gpus}{shared}" if row.gpus and row.state is not RowState.INTERRUPTED else UNKNOWN


def queue_status_line(rows: Sequence[QueueRow]) -> Text:
    """Return how many runs wait, and how many of them are this user's."""
    waiting = [row for row in rows if row.state is RowState.WAITING]
    own = sum(row.is_own for row in rows)
    parts = [f"{pluralize(len(waiting), 'run')} waiting", f"{own} of yours listed"]
    interrupted = sum(not row.is_live for row in rows)
    parts += [f"{interrupted} interrupted (u starts {'it' if interrupted == 1 else 'them'})"] if interrupted else []
    return Text(" " + ", ".join(parts), WARNING if interrupted else MUTED, no_wrap=True, end="", overflow="ellipsis")


def describe_row(row: QueueRow) -> str:
    """Return everything that the line of a run may cut off: its reason, and how it is ordered."""
    details = [f"--gpus {row.gpus}" if row.gpus else "", f"priority {row.priority}" if row.is_own else ""]
    details += [f"up to {row.share} runs per GPU" if row.share > 1 else ""]
    details += [f"reserves {format_bytes(row.min_free)} per GPU" if row.min_free else ""]
    return printable(f"{row.name} ({row.user}): {row.reason}" + "".join(f"; {part}" for part in details if part))


def waiting_line(row: QueueRow, name_width: int) -> Text:
    """Return the line of a waiting run on the monitor, in a list whose names have this width."""
    name = pad(printable(row.name), name_width, mode=Shorten.MIDDLE)
    sign, style = STATE_STYLES[RowState.WAITING]
    return Text.assemble((f"{sign} ", style), f"{name}  ", (wait_message(row), MUTED), no_wrap=True, end="")


def wait_message(row: QueueRow) -> str:
    """Return why a run waits, with its user if that is not this one."""
    return printable(row.reason + ("" if row.is_own else f"  ({row.user})"))
