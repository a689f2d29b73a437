"""SVG snapshots of the form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import demo_app, demo_runs, no_gpu_feed, wait_until_idle
from support.screen.screen_snapshots import Compare, Size, at_daily_sizes, matches_snapshot

pytestmark = pytest.mark.usefixtures("frozen_environment", "large_terminal")


@pytest.fixture
def large_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """plotext draws no chart that is larger than the terminal of the process."""
    monkeypatch.setenv("LINES", "60")
    monkeypatch.setenv("COLUMNS", "200")


@at_daily_sizes
def test_form(snap_compare: Compare, size: Size) -> None:
    """A GPU that others use is selected, and the number of epochs is changed."""
    demo_runs(Path("runs"))[0].release()
    keys = "n down down 0 down 3 0"
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), keys, size=size)


def test_form_with_mistakes(snap_compare: Compare) -> None:
    async def mistakes(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        for key, text in (("run.epochs", "many"), ("optim.lr", "-1")):
            screen.fields.select(key)
            await pilot.press(*text)
        await wait_until_idle(pilot)

    app = demo_app(Path("runs"), no_gpu_feed(), demo=None)
    assert matches_snapshot(snap_compare, app, "n", mistakes)


def test_form_with_choices(snap_compare: Compare) -> None:
    async def open_schedules(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        screen.fields.select("schedule.name")
        await pilot.press("enter", "down")
        await wait_until_idle(pilot)

    app = demo_app(Path("runs"), no_gpu_feed(), demo=None)
    assert matches_snapshot(snap_compare, app, "n", open_schedules)
