"""Screens and dialogs in a terminal that is too small for them: they are hidden and take no keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import demo_app, visible_text
from support.screen.screen_driver import drive, press
from tui.screens.dialogs import HelpDialog
from tui.screens.monitor import MonitorScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")
SMALL, LARGE = (40, 10), (100, 30)


def test_hidden_screen_takes_no_keys_but_those_for_help_and_quit(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app = pilot.app
        theme = app.theme
        await press(pilot, "n", "r", "Q", "t", "ctrl+p", "tab", "enter", "space", "slash", "ctrl+k", "escape")
        assert isinstance(app.screen, MonitorScreen) and len(app.screen_stack) == 1
        assert app.theme == theme
        await press(pilot, "question_mark", "j", "ctrl+p")
        assert isinstance(app.screen, HelpDialog)
        assert "Keys" in visible_text(pilot)
        await press(pilot, "escape")
        assert isinstance(app.screen, MonitorScreen)
        await press(pilot, "q")
        assert app.return_code == 0

    drive(demo_app(demo_runs_folder), act, SMALL)
