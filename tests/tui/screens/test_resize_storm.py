"""A terminal whose size changes faster than a screen is laid out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from textual import events
from textual.geometry import Size
from textual.pilot import Pilot
from textual.screen import Screen

from engine.runs.folder import RunFolder
from support.runs.profiles import make_profiled_run
from support.runs.sweeps import make_finished_trials
from support.screen.demo_app import demo_app
from support.screen.mistakes_driver import inspected_run, open_mistakes
from support.screen.screen_driver import (
    Drive,
    drive,
    open_profile,
    open_sweep,
    press,
    real_app,
    return_to_first_screen,
    wait_for_frame,
)

pytestmark = pytest.mark.usefixtures("isolated_folder", "unchecked")

SIZES = [Size(80, 24), Size(120, 34), Size(151, 48), Size(160, 59), Size(218, 48), Size(40, 10)]
STORM_RESIZES = 12


async def settles(pilot: Pilot[None]) -> None:
    """Resize the terminal without waiting for the layouts, then require that the layouts end."""
    screen: Screen[object] = pilot.app.screen
    for size in itertools.islice(itertools.cycle(SIZES), STORM_RESIZES):
        pilot.app.post_message(events.Resize(size, size))
        # Events of two sizes wait at the same time, as they do while a layout takes longer than a resize.
        for waiting in SIZES[:2]:
            screen.post_message(events.Resize(waiting, waiting))
            # Textual merges events that follow each other directly.
            screen.call_later(lambda: None)
        await asyncio.sleep(0)
    for _ in range(3):
        await wait_for_frame(pilot)
    # A layout that does not settle never returns to the event loop: the test times out before this line.
    assert screen.size == size


@pytest.mark.parametrize("screens", [("", "enter", "n"), ("r", "Q", "question_mark"), ("r enter", "r M c")])
def test_layout_settles_after_storm_of_resizes(demo_runs_folder: Path, screens: Sequence[str]) -> None:
    """The screens are named by the keys that open them from the monitor."""

    async def act(pilot: Pilot[None]) -> None:
        for keys in screens:
            await press(pilot, *keys.split())
            await settles(pilot)
            await pilot.resize_terminal(*SIZES[0])
            await return_to_first_screen(pilot)

    drive(demo_app(demo_runs_folder), act)


@pytest.mark.parametrize(
    ("make", "open_it"),
    [
        (make_finished_trials, open_sweep),
        (make_profiled_run, open_profile),
        (lambda root: inspected_run(root, root.parent / "photos"), open_mistakes),
    ],
    ids=["sweep", "profile", "mistakes"],
)
def test_layout_of_results_settles_after_storm_of_resizes(
    tmp_path: Path, make: Callable[[Path], object], open_it: Drive
) -> None:
    root = tmp_path / "runs"
    run = make(root)
    # A screen of a run starts with it; the others are opened by keys.
    folder = str(run.path) if isinstance(run, RunFolder) else None

    async def act(pilot: Pilot[None]) -> None:
        await open_it(pilot)
        await settles(pilot)

    drive(real_app(root, folder), act)
