"""Compare a screen with its stored SVG snapshot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import clipped_widgets, wait_until_idle
from tui.screens.app import GputrainApp

Compare = Callable[..., bool]
Before = Callable[[Pilot[None]], Awaitable[None]]
Size = tuple[int, int]
SIZE = (120, 34)
"""Size of the snapshots. Layouts at other sizes are asserted in `tests/tui/screens/test_layout.py`."""
DAILY_SIZES = ((80, 24), (160, 48))
"""Sizes of the snapshots of the screens that people use most: monitor, form, run and list of runs. Each has another
snapshot of `SIZE`."""

at_daily_sizes = pytest.mark.parametrize("size", DAILY_SIZES, ids=lambda size: f"{size[0]}x{size[1]}")


def matches_snapshot(
    compare: Compare, app: GputrainApp, keys: str = "", before: Before | None = None, size: Size = SIZE
) -> bool:
    """Press `keys`, call `before`, and compare the screen with its snapshot. Nothing may be clipped."""

    async def drive(pilot: Pilot[None]) -> None:
        await wait_until_idle(pilot)
        for key in keys.split():
            await pilot.press(key)
            await wait_until_idle(pilot)
        if before is not None:
            await before(pilot)
        assert clipped_widgets(pilot.app.screen) == []

    return compare(app, terminal_size=size, run_before=drive)
