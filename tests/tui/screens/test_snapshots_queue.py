"""The queue screen with runs of every state: an SVG snapshot, and its columns at other sizes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.queue.listing import QueueRow, RowState
from support.screen.demo_app import FROZEN_NOW, demo_app, demo_runs
from support.screen.layouts import each_layout, header_of, region_of
from support.screen.screen_driver import drive, press
from support.screen.screen_snapshots import Compare, matches_snapshot

pytestmark = pytest.mark.usefixtures("frozen_environment")


def make_row(name: str, place: int | None, waited_s: float, **values: Any) -> QueueRow:
    defaults = {
        "user": "ada", "uid": os.geteuid(), "state": RowState.WAITING, "since": FROZEN_NOW - waited_s,
        "gpus": "free:2", "folder": f"/runs/{name}", "key": name,
    }  # fmt: skip
    return QueueRow(name=name, place=place, **defaults | values)


BUSY = "2 free GPUs requested, 0 available: GPU 0, 1, 2, 3: reserved by run resnet-12 (user ada)"
ROWS = [
    make_row("flowers-3", 1, 5400, reason=BUSY, priority=5),
    make_row("bert", 2, 3000, uid=os.geteuid() + 1, user="bob", folder="", gpus="all", reason="no GPU is free"),
    make_row("flowers-4", 3, 1260, reason=BUSY, share=4),
    make_row("a-sweep-with-a-long-name-017", None, 900, state=RowState.HELD, reason="held; `gputrain queue release …`"),
    make_row("night-run", None, 600, state=RowState.DEPENDENT, reason="after run flowers-4, which is waiting"),
    make_row("digits-2", None, 86000, state=RowState.INTERRUPTED, reason="its supervisor was killed while it waited"),
]


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two users that wait, are held, wait for another run and were interrupted."""
    monkeypatch.setattr("tui.queue_poller.list_queue", lambda: ROWS)
    monkeypatch.setattr("engine.queue.listing.time.time", lambda: FROZEN_NOW)


def test_queue(snap_compare: Compare) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), "Q down down")


def test_queue_shows_more_columns_with_more_room() -> None:
    layouts = dict.fromkeys(((60, 20), (80, 24), (120, 34), (160, 48)), "queue-status / queue / queue-reason")

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "Q", "down")
        async for columns, _ in each_layout(pilot, layouts):
            more = "user gpus priority " if columns >= 120 else ""
            assert header_of(pilot, "queue") == f"# name state {more}waits reason"
            assert region_of(pilot, "queue-reason").height == 4

    drive(demo_app(Path("runs")), act)
