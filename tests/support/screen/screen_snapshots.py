"""Compare a screen with its stored SVG snapshot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import clipped_widgets, wait_until_idle
from tui.app import GputrainApp

Compare = Callable[..., bool]
Before = Callable[[Pilot[None]], Awaitable[None]]
Size = tuple[int, int]
DAILY_SIZES = ((80, 24), (160, 48))


def size_name(size: Size) -> str:
    """Name of a parameter: 80x24."""
    return f"{size[0]}x{size[1]}"


def at_sizes(*sizes: Size) -> pytest.MarkDecorator:
    """Parametrize `size`. Of several sizes, those that are not among `DAILY_SIZES` are compared at night."""
    daily = DAILY_SIZES if len(sizes) > 1 else sizes
    parameters = [size if size in daily else pytest.param(size, marks=pytest.mark.nightly) for size in sizes]
    return pytest.mark.parametrize("size", parameters, ids=[size_name(size) for size in sizes])


def matches_snapshot(
    compare: Compare, app: GputrainApp, size: Size, keys: str = "", before: Before | None = None
) -> bool:
    """Press `keys`, call `before`, and compare the screen of this size with its snapshot. Nothing may be clipped."""

    async def drive(pilot: Pilot[None]) -> None:
        await wait_until_idle(pilot)
        for key in keys.split():
            await pilot.press(key)
            await wait_until_idle(pilot)
        if before is not None:
            await before(pilot)
        assert clipped_widgets(pilot.app.screen) == []

    return compare(app, terminal_size=size, run_before=drive)
