"""SVG snapshots of the compare screen: two runs, eight runs, and seeds as a band beside a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.runs.compared_runs import make_compared_run
from support.screen.demo_app import demo_app, no_gpu_feed, wait_until, wait_until_idle
from support.screen.screen_snapshots import Compare, Size, at_sizes, matches_snapshot
from tui.app import GputrainApp
from tui.screens.compare import CompareScreen

pytestmark = pytest.mark.usefixtures("frozen_environment")
SIZES = at_sizes((80, 24), (160, 48))


def compare_app(names: Sequence[str], baseline: int | None = None) -> GputrainApp:
    app = demo_app(Path("runs"), no_gpu_feed(), demo=None)
    app._compared, app._baseline = [Path("runs") / name for name in names], baseline
    return app


async def until_drawn(pilot: Pilot[None]) -> None:
    screen = pilot.app.screen
    assert isinstance(screen, CompareScreen)
    await wait_until(pilot, lambda: screen.compare_poller.caught_up)
    screen._rebuild()
    await wait_until_idle(pilot)


@SIZES
def test_compare_two_runs(snap_compare: Compare, size: Size) -> None:
    make_compared_run(Path("runs"), "slow", lr=0.05)
    make_compared_run(Path("runs"), "fast", lr=0.2, epochs=3)
    app = compare_app(["slow", "fast"])

    async def with_cursor(pilot: Pilot[None]) -> None:
        await until_drawn(pilot)
        for _ in range(40):
            await pilot.press("left")
        await wait_until_idle(pilot)

    assert matches_snapshot(snap_compare, app, size, before=with_cursor)


@SIZES
def test_compare_eight_runs(snap_compare: Compare, size: Size) -> None:
    names = [f"sweep-{number}" for number in range(8)]
    for number, name in enumerate(names):
        make_compared_run(Path("runs"), name, lr=0.02 * (number + 1), epochs=3 + number % 2)
    assert matches_snapshot(snap_compare, compare_app(names), size, before=until_drawn)


@SIZES
def test_compare_band_and_baseline(snap_compare: Compare, size: Size) -> None:
    names = ["seed-0", "seed-1", "seed-2", "slow"]
    for seed in range(3):
        make_compared_run(Path("runs"), names[seed], seed=seed)
    make_compared_run(Path("runs"), "slow", lr=0.04)
    assert matches_snapshot(snap_compare, compare_app(names, 3), size, before=until_drawn)
