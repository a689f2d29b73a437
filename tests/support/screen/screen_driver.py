"""Run the app in a test and press keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual import events
from textual.pilot import Pilot

from support.screen.demo_app import demo_app, no_gpu_feed, wait_until, wait_until_idle
from tui.screens.app import GputrainApp
from tui.screens.profile import ProfileScreen
from tui.screens.run import RunScreen
from tui.screens.sweep import SweepScreen

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


async def type_keys(pilot: Pilot[None], *keys: str) -> None:
    """Press keys one after the other, and wait once at the end."""
    await pilot.press(*keys)
    await wait_until_idle(pilot)


async def wait_for_frame(pilot: Pilot[None]) -> None:
    """Wait until the screen has drawn what has changed."""
    await pilot.pause()
    has_drawn = asyncio.Event()
    pilot.app.screen.call_after_refresh(has_drawn.set)
    await has_drawn.wait()


async def return_to_first_screen(pilot: Pilot[None]) -> None:
    while len(pilot.app.screen_stack) > 1:
        await press(pilot, "escape")


def real_app(root: Path, run: str | None = None) -> GputrainApp:
    return demo_app(root, no_gpu_feed(), demo=None, run=run)


def press_in_burst(pilot: Pilot[None], *keys: str) -> None:
    """Send all keys at once, like a terminal after a pause of the program."""
    for key in keys:
        pilot.app.post_message(events.Key(key, key if len(key) == 1 else None))


async def open_profile(pilot: Pilot[None]) -> ProfileScreen:
    assert isinstance(pilot.app.screen, RunScreen)
    await wait_until(pilot, lambda: pilot.app.screen.state is not None)  # type: ignore[attr-defined]
    await press(pilot, "P")
    screen = pilot.app.screen
    assert isinstance(screen, ProfileScreen)
    await wait_until(pilot, lambda: screen.poller.has_polled)
    screen.update_content()
    await wait_until_idle(pilot)
    return screen


async def open_sweep(pilot: Pilot[None]) -> SweepScreen:
    """Open the sweep of the run under the cursor of the list."""
    await press(pilot, "r", "S")
    assert isinstance(pilot.app.screen, SweepScreen)
    await wait_until_idle(pilot)
    return pilot.app.screen
