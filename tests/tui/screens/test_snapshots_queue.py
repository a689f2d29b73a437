"""The queue screen with runs of every state: an SVG snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.screen.demo_app import FROZEN_NOW, demo_app, demo_runs
from support.screen.queue_rows import QUEUE_ROWS
from support.screen.screen_snapshots import Compare, matches_snapshot

pytestmark = pytest.mark.usefixtures("frozen_environment")


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two users that wait, are held, wait for another run and were interrupted."""
    monkeypatch.setattr("tui.screens.pollers.files.list_queue", lambda: QUEUE_ROWS)
    monkeypatch.setattr("engine.jobs.queue.listing.time.time", lambda: FROZEN_NOW)


def test_queue(snap_compare: Compare) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), "Q down down")
