"""The list of runs, driven by keys and the mouse."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.folder import RunFolder
from engine.runs.journal import JournalReader
from support.replace import replace
from support.runs.factories import append_events
from support.screen.demo_app import demo_app, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, real_app
from tui.screens.demo.server import FINISHED_RUN, LIVE_RUN
from tui.screens.form import FormScreen
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.screens.widgets.lines import Lines

pytestmark = pytest.mark.usefixtures("isolated_folder")
WIDE = (160, 48)


@pytest.fixture
def many_runs(demo_runs_folder: Path) -> Path:
    """A folder with 40 finished runs besides the demo's."""
    for number in range(40):
        shutil.copytree(demo_runs_folder / FINISHED_RUN, demo_runs_folder / f"copy-{number:02d}")
    return demo_runs_folder


def test_runs_screen_follows_journal(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        run = RunFolder(demo_runs_folder / LIVE_RUN)
        last = next(event for event in reversed(list(JournalReader(run.journal).poll())) if event.type == "epoch")
        append_events(run, replace(last, epoch=19))
        await wait_until(pilot, lambda: "19/30" in visible_text(pilot, "#all-runs"))

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_runs_screen_marks_foreign_run_in_narrow_terminal(demo_runs_folder: Path) -> None:
    (demo_runs_folder / FINISHED_RUN).chmod(0o777)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j")
        shown = visible_text(pilot, "#all-runs")
        assert f"○!{FINISHED_RUN}" in shown
        assert "This run is writable by all users" in visible_text(pilot)

    drive(demo_app(demo_runs_folder), act, (80, 24))


def test_runs_screen_click_selects_and_double_click_opens(many_runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        runs = pilot.app.screen.query_one("#all-runs", Lines)
        for row in (10, runs.size.height - 2, 0):
            name = runs._rows[row].key
            # The frame and the header take a line each.
            await pilot.click("#all-runs", offset=(5, row + 2))
            await wait_until_idle(pilot)
            assert runs.selected_key == name
        await pilot.click("#all-runs", offset=(5, 2), times=2)
        await wait_until_idle(pilot)
        assert isinstance(pilot.app.screen, RunScreen)
        assert str(pilot.app.screen.folder.path) == name

    drive(demo_app(many_runs), act, WIDE)


def test_runs_screen_without_runs_says_what_to_do(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        assert isinstance(pilot.app.screen, RunsScreen)
        assert "No runs here yet; press n to start one" in visible_text(pilot, "#all-runs")
        await press(pilot, "enter", "s", "u", "a")
        assert isinstance(pilot.app.screen, RunsScreen)
        await press(pilot, "n")
        assert isinstance(pilot.app.screen, FormScreen)

    drive(real_app(tmp_path / "runs"), act, WIDE)
