"""SVG snapshot of the screen of a profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.folder import RunFolder
from support.runs.profiles import PROFILE, store_profile
from support.screen.demo_app import demo_app, demo_runs
from support.screen.screen_driver import open_profile
from support.screen.screen_snapshots import Compare, matches_snapshot
from tui.screens.demo.server import FINISHED_RUN

pytestmark = pytest.mark.usefixtures("frozen_environment")


def test_profile(snap_compare: Compare) -> None:
    root = Path("runs")
    demo_runs(root)[0].release()
    store_profile(RunFolder(root / FINISHED_RUN), PROFILE)

    async def show(pilot: Pilot[None]) -> None:
        await open_profile(pilot)

    assert matches_snapshot(snap_compare, demo_app(root, demo=None, run=FINISHED_RUN), before=show)
