"""The queue of runs that wait for GPUs, for `gputrain queue`, the monitor and the queue screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from engine.queue.listing import QueueRow, RowState
from engine.runs.folder import RunState
from engine.show.table import Align, Column, Shorten, pad
from engine.utils.text import printable
from engine.utils.units import UNKNOWN, format_bytes, format_duration
from tui.palette import GOOD, MUTED, STRONG, WARNING
from tui.phrases import state_symbol

OTHERWISE_BLOCKED = ("…", MUTED)
STATE_STYLES = {
    RowState.WAITING: ("◌", WARNING),
    RowState.HELD: ("‖", MUTED),
    RowState.DEPENDENT: OTHERWISE_BLOCKED,
    RowState.SCHEDULED: OTHERWISE_BLOCKED,
    RowState.LIMITED: OTHERWISE_BLOCKED,
    RowState.INTERRUPTED: state_symbol(RunState.INTERRUPTED),
    RowState.PENDING: ("◌", WARNING),
}
# The command prints all cells in full.
PLAIN_COLUMNS: tuple[Column[QueueRow], ...] = (
    Column("place", "#", lambda row: place_cell(row), Align.RIGHT),
    Column("name", "name", lambda row: row.name, style=lambda row: STRONG if row.is_own else ""),
    Column("user", "user", lambda row: row.user or UNKNOWN, style=lambda row: GOOD if row.is_own else ""),
    Column("state", "state", lambda row: row.state, style=lambda row: STATE_STYLES[row.state][1]),
    Column("gpus", "gpus", lambda row: gpus_cell(row)),
    Column("priority", "priority", lambda row: str(row.priority), Align.RIGHT),
    Column("waits", "waits", lambda row: format_duration(row.waited_s), Align.RIGHT),
    Column("reason", "reason", lambda row: row.reason, style=MUTED),
)
SCREEN_COLUMNS: tuple[Column[QueueRow], ...] = (
    Column("place", "#  ", lambda row: ((f"{place_cell(row)} ", MUTED), STATE_STYLES[row.state]), Align.RIGHT,
           priority=9),
    Column("name", "name", lambda row: row.name, width=12, max_width=32, priority=9, flex=True,
           style=lambda row: STRONG if row.is_own else "", shorten=Shorten.MIDDLE),
    Column("user", "user", lambda row: row.user or UNKNOWN, width=4, max_width=12, priority=5,
           style=lambda row: GOOD if row.is_own else ""),
    Column("gpus", "gpus", lambda row: gpus_cell(row), priority=8),
    Column("reason", "waits for", lambda row: row.reason, width=27, priority=9, flex=True),
    Column("priority", "priority", lambda row: str(row.priority) if row.priority else "", Align.RIGHT,
           priority=1, optional=True),
    Column("waits", "waits", lambda row: format_duration(row.waited_s), Align.RIGHT, priority=4),
)  # fmt: skip


def place_cell(row: QueueRow) -> str:
    """Return the place among the runs that wait for GPUs only."""
    return UNKNOWN if row.place is None else str(row.place)


def gpus_cell(row: QueueRow) -> str:
    """Return `device.gpus`, with the number of runs that may share them, and the memory that it reserves of each."""
    shared = f" /{row.share}" if row.share > 1 else ""
    shared += f" {format_bytes(row.min_free)}" if row.min_free else ""
    return f"{row.gpus}{shared}" if row.gpus and row.state is not RowState.INTERRUPTED else UNKNOWN


def queue_title(rows: Sequence[QueueRow]) -> str:
    """Return how many runs wait, and how many of them are this user's, as markup."""
    waiting = [row for row in rows if row.state is RowState.WAITING]
    own = sum(row.is_own for row in rows)
    title = f"{len(waiting)} waiting for GPUs, {own} of yours listed"
    interrupted = sum(row.state is RowState.INTERRUPTED for row in rows)
    note = f", {interrupted} interrupted (u starts {'it' if interrupted == 1 else 'them'})"
    return f"{title}[$warning]{note}[/]" if interrupted else title


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
    return Text.assemble((f" {sign} ", style), f"{name}  ", (wait_message(row), MUTED), no_wrap=True, end="")


def wait_message(row: QueueRow) -> str:
    """Return why a run waits, with its user if that is not this one."""
    return printable(row.reason + ("" if row.is_own else f"  ({row.user})"))
