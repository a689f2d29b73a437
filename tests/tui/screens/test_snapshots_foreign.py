"""SVG snapshots of the screen of a run that another program recorded."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.watch.folders import find_runs
from support.screen.demo_app import FROZEN_NOW, demo_app, no_gpu_feed, wait_until_idle
from support.screen.screen_snapshots import Compare, Size, matches_snapshot
from tui.screens.app import GputrainApp

RECORDINGS = Path(__file__).parents[2] / "recordings" / "foreign"
LOG = "".join(f"epoch {epoch}: loss {1 / epoch:.4f}\n" for epoch in range(1, 9))

pytestmark = pytest.mark.usefixtures("frozen_environment")


@pytest.mark.parametrize("size", [(80, 24), (160, 48)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_foreign_run(snap_compare: Compare, size: Size) -> None:
    shutil.copytree(RECORDINGS / "trainer", "logs")
    Path("logs/train.log").write_text(LOG)
    for path in Path("logs").rglob("*"):
        os.utime(path, (FROZEN_NOW - 42, FROZEN_NOW - 42))
    [run] = find_runs(Path("logs")).runs
    app = demo_app(Path("runs"), no_gpu_feed(), demo=None)

    async def open_run(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app, GputrainApp)
        # The snapshot has no path of this test.
        pilot.app.open_foreign_run(replace(run, folder=Path("logs")))
        await wait_until_idle(pilot)

    assert matches_snapshot(snap_compare, app, before=open_run, size=size)
