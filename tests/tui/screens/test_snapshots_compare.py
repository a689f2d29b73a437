"""The compare screen: SVG snapshot of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.runs.compared_runs import make_compared_run
from support.screen.demo_app import demo_app, no_gpu_feed, wait_until, wait_until_idle
from support.screen.screen_snapshots import Compare, matches_snapshot
from tui.screens.app import GputrainApp
from tui.screens.compare import CompareScreen

pytestmark = pytest.mark.usefixtures("frozen_environment")


def compare_app(names: Sequence[str]) -> GputrainApp:
    app = demo_app(Path("runs"), no_gpu_feed(), demo=None)
    app._first = partial(GputrainApp.open_compare, runs=[Path("runs") / name for name in names])
    return app


async def until_drawn(pilot: Pilot[None]) -> None:
    screen = pilot.app.screen
    assert isinstance(screen, CompareScreen)
    await wait_until(pilot, lambda: screen.compare_poller.caught_up)
    screen._rebuild()
    await wait_until_idle(pilot)


def test_compare_two_runs(snap_compare: Compare) -> None:
    make_compared_run(Path("runs"), "slow", lr=0.05)
    make_compared_run(Path("runs"), "fast", lr=0.2, epochs=3)
    app = compare_app(["slow", "fast"])

    async def with_cursor(pilot: Pilot[None]) -> None:
        await until_drawn(pilot)
        await pilot.press("tab")
        for _ in range(40):
            await pilot.press("left")
        await wait_until_idle(pilot)

    assert matches_snapshot(snap_compare, app, before=with_cursor)
