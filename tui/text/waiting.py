"""The runs that wait for GPUs of this host. Until they get them, they have no run folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from engine.gpus.reservation_reader import ReservationInfo, read_reservations
from engine.utils.text import pluralize, printable
from tui.palette import MUTED, WARNING
from tui.text.tables import shorten_middle

WAITING_SYMBOL = "◌"


@dataclass(frozen=True)
class WaitingRun:
    """A run in the queue for GPUs. `key` is unique, and `message` says what it waits for."""

    key: str
    name: str
    message: str

    def line(self, name_width: int) -> Text:
        """Return the line of the run, for a list whose names have this width."""
        name = shorten_middle(printable(self.name), name_width)
        return Text.assemble(
            (f"{WAITING_SYMBOL} ", WARNING), f"{name:<{name_width}}  ", (self.message, MUTED), no_wrap=True, end=""
        )


def read_waiting_runs() -> list[WaitingRun]:
    """Return the runs of all users of this host that wait for GPUs, in queue order."""
    queue = [reservation for reservation in read_reservations() if reservation.is_waiting]
    return [
        WaitingRun(f"waiting {waiter.key}", waiter.run, wait_message(waiter, queue[:position]))
        for position, waiter in enumerate(queue)
    ]


def wait_message(waiter: ReservationInfo, ahead: Sequence[ReservationInfo]) -> str:
    """Return `waits for 2 free GPUs, 1 run ahead`."""
    if match := re.fullmatch(r"free:(\d+)", waiter.selection):
        wanted = pluralize(int(match[1]), "free GPU")
    elif waiter.selection in ("auto", "all"):
        wanted = "free GPUs" if waiter.selection == "auto" else "all GPUs"
    else:
        wanted = f"{'GPUs' if ',' in waiter.selection else 'GPU'} {waiter.selection}"
    position = f"{pluralize(len(ahead), 'run')} ahead" if ahead else "next in the queue"
    owner = "" if waiter.uid == os.geteuid() else f"  ({waiter.user})"
    return printable(f"waits for {wanted}, {position}{owner}")
