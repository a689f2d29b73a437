"""The runs that wait for GPUs of this host, as lines for the monitor."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from engine.queue.listing import QueueRow, list_queue
from engine.utils.text import printable
from tui.palette import MUTED, WARNING
from tui.text.run_lines import fit_middle

WAITING_SYMBOL = "◌"


@dataclass(frozen=True)
class WaitingRun:
    """A run in the queue for GPUs. `key` is unique, `message` says what it waits for, and `folder` is that of an own
    run."""

    key: str
    name: str
    message: str
    folder: str = ""

    def line(self, name_width: int) -> Text:
        """Return the line of the run, for a list whose names have this width."""
        name = fit_middle(printable(self.name), name_width)
        return Text.assemble((f"{WAITING_SYMBOL} ", WARNING), f"{name}  ", (self.message, MUTED), no_wrap=True, end="")


def read_waiting_runs() -> list[WaitingRun]:
    """Return the runs of all users of this host that wait for GPUs, in queue order."""
    return [WaitingRun(row.key, row.name, wait_message(row), row.folder) for row in list_queue()]


def wait_message(row: QueueRow) -> str:
    """Return why a run waits, with its user if that is not this one."""
    return printable(row.reason + ("" if row.is_own else f"  ({row.user})"))
