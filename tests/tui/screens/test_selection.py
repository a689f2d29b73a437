"""Text that is selected with the mouse is copied: of the log, of dialogs and of the form's command."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import demo_app, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press
from tui.screens.demo.server import LIVE_RUN

pytestmark = pytest.mark.usefixtures("isolated_folder")


async def drag(pilot: Pilot[None], selector: str, start: tuple[int, int], end: tuple[int, int]) -> None:
    """Drag from one cell of the content of a widget to another one."""
    await pilot.mouse_down(selector, offset=(start[0] + 1, start[1] + 1))
    await pilot.hover(selector, offset=(end[0] + 1, end[1] + 1))
    await pilot.mouse_up(selector, offset=(end[0] + 1, end[1] + 1))
    await wait_until_idle(pilot)


@pytest.mark.usefixtures("unchecked")
def test_text_that_is_dragged_over_is_copied(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        # From the screen of the run to its log, and over the monitor to the form.
        for keys, selector in (("", "#log"), ("l", "LogDialog Lines"), ("escape escape n", "#command")):
            await press(pilot, *keys.split())
            await wait_until_idle(pilot)
            inset = 0 if "Dialog" in selector else 1
            shown = [line[inset:] for line in visible_text(pilot, selector).splitlines()[inset:]]
            pilot.app.copy_to_clipboard("")
            await drag(pilot, selector, (3 - (not inset), -(not inset)), (9 - (not inset), -(not inset)))
            await wait_until(pilot, lambda: bool(pilot.app.clipboard))
            assert pilot.app.clipboard in (shown[0][3:9], shown[0][3:10]), selector

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act, (120, 40))
