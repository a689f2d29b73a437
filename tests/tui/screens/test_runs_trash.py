"""Renaming and deleting runs in the list, and the trash, driven by keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.messages import says
from support.screen.demo_app import demo_app, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, real_app
from tui.app import GputrainApp
from tui.demo.server import FINISHED_RUN, LIVE_RUN
from tui.screens.runs import RunsScreen
from tui.screens.trash import TrashScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")
SIZE = (120, 24)


def toasts(pilot: Pilot[None]) -> list[str]:
    return [notification.message for notification in pilot.app._notifications]


async def confirm(pilot: Pilot[None]) -> None:
    """Answer a question with its second answer."""
    await pilot.press("down", "enter")
    await wait_until_idle(pilot)


def test_delete_names_what_goes_and_trash_restores_it(demo_runs_folder: Path) -> None:
    run = demo_runs_folder / FINISHED_RUN
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "step-00000010.pt").write_bytes(b"x" * 4096)
    files = {path.name for path in run.iterdir()}

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j", "D")
        await wait_until(pilot, lambda: f"Move {FINISHED_RUN} to the trash?" in visible_text(pilot))
        assert "finished" in visible_text(pilot, ".note") and "1 checkpoint" in visible_text(pilot, ".note")
        await press(pilot, "enter")
        assert run.exists()
        await press(pilot, "D")
        await wait_until(pilot, lambda: "Move to the trash" in visible_text(pilot))
        await confirm(pilot)
        await wait_until(pilot, lambda: not run.exists())
        await wait_until(pilot, lambda: FINISHED_RUN not in visible_text(pilot, "#all-runs"))
        await press(pilot, "z")
        assert isinstance(pilot.app.screen, TrashScreen)
        await wait_until(pilot, lambda: "Trash: 1 run" in visible_text(pilot, "#trash"))
        assert FINISHED_RUN in visible_text(pilot, "#trash")
        await press(pilot, "enter")
        await wait_until(pilot, run.exists)
        await wait_until(pilot, lambda: "The trash is empty" in visible_text(pilot, "#trash"))

    drive(real_app(demo_runs_folder), act, SIZE)
    assert {path.name for path in run.iterdir()} - {".lock"} == files


def test_trash_is_emptied_after_a_question(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j", "space", "space", "D")
        await wait_until(pilot, lambda: "Move 2 runs to the trash?" in visible_text(pilot))
        await confirm(pilot)
        await wait_until(pilot, lambda: not (demo_runs_folder / "cifar-4").exists())
        await press(pilot, "z")
        await wait_until(pilot, lambda: "Trash: 2 runs" in visible_text(pilot, "#trash"))
        await press(pilot, "E")
        assert "Delete 2 runs in the trash for good?" in visible_text(pilot)
        await press(pilot, "enter")
        assert "Trash: 2 runs" in visible_text(pilot, "#trash")
        await press(pilot, "D")
        await confirm(pilot)
        await wait_until(pilot, lambda: "Trash: 1 run" in visible_text(pilot, "#trash"))
        await press(pilot, "E")
        await confirm(pilot)
        await wait_until(pilot, lambda: "The trash is empty" in visible_text(pilot, "#trash"))

    drive(real_app(demo_runs_folder), act, SIZE)
    assert list((demo_runs_folder / ".trash").iterdir()) == []


def test_rename_keeps_mark_and_refuses_live_run_and_used_name(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "R")
        assert any(says(toast, "wrong-state", LIVE_RUN, "running", "renamed") for toast in toasts(pilot))
        assert isinstance(pilot.app.screen, RunsScreen)
        await press(pilot, "j", "space", "k", "R")
        await pilot.press(*["backspace"] * len(FINISHED_RUN), *"cifar", "minus", "4", "enter")
        await wait_until(pilot, lambda: says(visible_text(pilot, ".problem"), "name-in-use", "cifar-4"))
        await pilot.press("0", "enter")
        await wait_until(pilot, lambda: "◆○ cifar-40" in visible_text(pilot, "#all-runs"))
        assert isinstance(pilot.app, GputrainApp)
        assert pilot.app.marked_runs == {str(demo_runs_folder / "cifar-40"): None}

    drive(real_app(demo_runs_folder), act, SIZE)


def test_demo_changes_no_run(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j", "D", "R", "A")
        assert [says(toast, "not-supported") for toast in toasts(pilot)] == [True] * 3
        assert (demo_runs_folder / FINISHED_RUN).exists()

    drive(demo_app(demo_runs_folder), act, SIZE)
