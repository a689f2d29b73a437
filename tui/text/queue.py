"""The queue of runs that wait for GPUs as text, for `gputrain queue`, the monitor and the queue screen."""

from __future__ import annotations

from collections.abc import Sequence

from engine.queue.listing import QueueRow, RowState
from engine.utils.text import printable
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
