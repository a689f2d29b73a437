"""A queue with a run in every state."""

from __future__ import annotations

import os
from typing import Any

from engine.jobs.queue.listing import QueueRow, RowState
from support.screen.demo_app import FROZEN_NOW


def make_row(name: str, place: int | None, waited_s: float, **values: Any) -> QueueRow:
    defaults = {
        "user": "ada", "uid": os.geteuid(), "state": RowState.WAITING, "since": FROZEN_NOW - waited_s,
        "gpus": "free:2", "folder": f"/runs/{name}", "key": name,
    }  # fmt: skip
    return QueueRow(name=name, place=place, **defaults | values)


BUSY = (
    "4 free GPUs requested, 2 available: 2 GPUs (0, 1): reserved by run fashion-17 (user ada); 3 GPUs (4, 5, 6): in use"
)
QUEUE_ROWS = [
    make_row("flowers-3", 1, 5400, gpus="free:4", reason=BUSY, priority=5),
    make_row("bert", 2, 3000, uid=os.geteuid() + 1, user="bob", folder="", gpus="all", reason="no GPU is free"),
    make_row("flowers-4", 3, 1260, reason="waits behind flowers-3 and bert", share=4),
    make_row("a-sweep-with-a-long-name-017", None, 900, state=RowState.HELD, reason="held; `gputrain queue release …`"),
    make_row(
        "night-run",
        None,
        600,
        state=RowState.DEPENDENT,
        reason="after run flowers-4, which is waiting",
        after=("flowers-4",),
    ),
    make_row("digits-2", None, 86000, state=RowState.INTERRUPTED, reason="its supervisor was killed while it waited"),
]
