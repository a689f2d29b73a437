"""Screens and dialogs in a terminal that is too small for them: they are hidden and take no keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events
from textual.pilot import Pilot

from engine.runs.events import RunFinished
from support.runs.event_factories import make_run_started
from support.runs.factories import make_run_folder
from support.screen.demo_app import demo_app, visible_text, wait_until, wait_until_idle
from support.screen.form_driver import form_of, type_into
from support.screen.screen_driver import drive, press, real_app
from tui.screens.app import GputrainApp
from tui.screens.demo.server import LIVE_RUN
from tui.screens.dialogs import ChoiceDialog, HelpDialog
from tui.screens.monitor import MonitorScreen
from tui.screens.run import RunScreen
from tui.screens.widgets.lines import Lines

pytestmark = pytest.mark.usefixtures("isolated_folder")
SMALL, LARGE = (40, 10), (100, 30)


async def resize(pilot: Pilot[None], size: tuple[int, int]) -> None:
    await pilot.resize_terminal(*size)
    await wait_until_idle(pilot)


def test_hidden_screen_takes_no_keys_but_those_for_help_and_quit(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app = pilot.app
        theme = app.theme
        await press(pilot, "n", "r", "Q", "t", "tab", "enter", "space", "slash", "ctrl+k", "escape")
        assert isinstance(app.screen, MonitorScreen) and len(app.screen_stack) == 1
        assert app.theme == theme
        await press(pilot, "question_mark", "j")
        assert isinstance(app.screen, HelpDialog)
        assert "Keys" in visible_text(pilot)
        await press(pilot, "escape")
        assert isinstance(app.screen, MonitorScreen)
        await press(pilot, "q")
        assert app.return_code == 0

    drive(demo_app(demo_runs_folder), act, SMALL)


@pytest.mark.usefixtures("unchecked")
def test_hidden_form_takes_no_text_and_gets_its_focus_back(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        await type_into(pilot, "run.epochs", "6")
        await resize(pilot, SMALL)
        await press(pilot, "7", "tab", "down", "enter", "escape", "ctrl+s")
        pilot.app.post_message(events.Paste("8"))
        await wait_until_idle(pilot)
        assert pilot.app.screen is form
        await resize(pilot, LARGE)
        assert form.form.overrides == {"run.epochs": "6"}
        await press(pilot, "9")
        assert form.form.overrides == {"run.epochs": "9"}

    drive(real_app(tmp_path / "runs"), act, LARGE)


def test_hidden_dialog_takes_no_keys(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "s")
        dialog = pilot.app.screen
        assert isinstance(dialog, ChoiceDialog)
        await resize(pilot, SMALL)
        assert visible_text(pilot).strip() == ""
        assert pilot.app.screen_stack[-2].query_one("#too-small").display
        await press(pilot, "down", "enter", "escape")
        assert pilot.app.screen is dialog
        await resize(pilot, LARGE)
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, RunScreen)

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act, LARGE)


def test_ctrl_q_is_no_key(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "ctrl+s", "ctrl+q", "r")
        assert pilot.app.return_code is None
        assert len(pilot.app.screen_stack) == 2

    drive(demo_app(demo_runs_folder), act, LARGE)


def test_toast_never_covers_the_row_under_the_cursor(tmp_path: Path) -> None:
    for number in range(20):
        make_run_folder(tmp_path / "runs", f"run-{number:02d}", make_run_started(), RunFinished(state="finished"))

    async def act(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app, GputrainApp)
        await press(pilot, "r")
        lines = pilot.app.screen.query_one(Lines)
        for key in ("g", "G"):
            pilot.app.clear_notifications()
            await press(pilot, key)
            name = Path(str(lines.selected_key)).name
            pilot.app.show_toast(f"{name} cannot be resumed from here. " * 6)
            await wait_until(pilot, lambda: "cannot be resumed" in visible_text(pilot))
            assert name in visible_text(pilot).splitlines()[lines.content_region.y + lines.cursor_y]

    drive(real_app(tmp_path / "runs"), act, (60, 20), notifications=True)
