"""Run the app in a test and press keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual import events
from textual.pilot import Pilot

from support.screen.demo_app import demo_app, no_gpu_feed, wait_until_idle
from tui.app import GputrainApp

Drive = Callable[[Pilot[None]], Awaitable[None]]


def drive(app: GputrainApp, act: Drive, size: tuple[int, int] = (100, 30), *, notifications: bool = False) -> None:
    """Run the app and call `act`. With `notifications`, toasts are on the screen."""

    async def main() -> None:
        async with app.run_test(size=size, notifications=notifications) as pilot:
            await wait_until_idle(pilot)
            await act(pilot)

    asyncio.run(main())


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await wait_until_idle(pilot)


async def wait_for_frame(pilot: Pilot[None]) -> None:
    """Wait until the screen has drawn what has changed."""
    await pilot.pause()
    has_drawn = asyncio.Event()
    pilot.app.screen.call_after_refresh(has_drawn.set)
    await has_drawn.wait()


def real_app(root: Path, run: str | None = None) -> GputrainApp:
    return demo_app(root, no_gpu_feed(), demo=None, run=run)


def press_in_burst(pilot: Pilot[None], *keys: str) -> None:
    """Send all keys at once, like a terminal after a pause of the program."""
    for key in keys:
        pilot.app.post_message(events.Key(key, key if len(key) == 1 else None))
