"""SVG snapshots of the queue screen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.queue.listing import QueueRow, RowState
from support.screen.demo_app import FROZEN_NOW, demo_app, demo_runs
from support.screen.screen_snapshots import Compare, Size, at_sizes, matches_snapshot
from tui.screens.queue import QueueScreen

SIZES = [(80, 24), (160, 48)]

pytestmark = [pytest.mark.usefixtures("frozen_environment"), at_sizes(*SIZES)]


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


def show(rows: list[QueueRow], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.queue_poller.list_queue", lambda: rows)
    monkeypatch.setattr("engine.queue.listing.time.time", lambda: FROZEN_NOW)


def test_queue(snap_compare: Compare, size: Size, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two users that wait, are held, wait for another run and were interrupted; the cursor is on the third."""
    show(ROWS, monkeypatch)
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), size, "Q down down")


def test_empty_queue(snap_compare: Compare, size: Size, monkeypatch: pytest.MonkeyPatch) -> None:
    show([], monkeypatch)
    demo_runs(Path("runs"))[0].release()

    async def before(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app.screen, QueueScreen)

    assert matches_snapshot(snap_compare, demo_app(Path("runs")), size, "Q", before)
