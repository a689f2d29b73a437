"""The compare screen: SVG snapshots of two runs and of seeds as a band, and the layout of eight runs at each size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.runs.compared_runs import make_compared_run
from support.screen.demo_app import demo_app, no_gpu_feed, wait_until, wait_until_idle
from support.screen.layouts import each_layout, header_of
from support.screen.screen_driver import drive
from support.screen.screen_snapshots import Compare, matches_snapshot
from tui.app import GputrainApp
from tui.screens.compare import CompareScreen

pytestmark = pytest.mark.usefixtures("frozen_environment")


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


def test_compare_two_runs(snap_compare: Compare) -> None:
    make_compared_run(Path("runs"), "slow", lr=0.05)
    make_compared_run(Path("runs"), "fast", lr=0.2, epochs=3)
    app = compare_app(["slow", "fast"])

    async def with_cursor(pilot: Pilot[None]) -> None:
        await until_drawn(pilot)
        for _ in range(40):
            await pilot.press("left")
        await wait_until_idle(pilot)

    assert matches_snapshot(snap_compare, app, before=with_cursor)


def test_compare_band_and_baseline(snap_compare: Compare) -> None:
    names = ["seed-0", "seed-1", "seed-2", "slow"]
    for seed in range(3):
        make_compared_run(Path("runs"), names[seed], seed=seed)
    make_compared_run(Path("runs"), "slow", lr=0.04)
    assert matches_snapshot(snap_compare, compare_app(names, 3), before=until_drawn)


def test_compare_of_eight_runs_has_more_charts_with_more_room() -> None:
    names = [f"sweep-{number}" for number in range(8)]
    for number, name in enumerate(names):
        make_compared_run(Path("runs"), name, lr=0.02 * (number + 1), epochs=1)
    runs, one, two = "compared-runs differences", "train_loss", "train_loss accuracy"
    four = f"{two} / val_loss lr / {runs}"
    layouts = {(60, 20): f"{one} / {runs}", (80, 24): f"{one} / {runs}", (120, 34): f"{two} / {runs}", (160, 48): four}
    columns = {(60, 20): "6 more A B", (80, 24): "5 more A B C", (120, 34): "2 more A B C D E F"}

    async def act(pilot: Pilot[None]) -> None:
        await until_drawn(pilot)
        async for size in each_layout(pilot, layouts):
            assert header_of(pilot, "differences") == columns.get(size, "A B C D E F G H")

    drive(compare_app(names), act)
