"""Deleting runs in the list, driven by keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.manage import list_trash
from support.messages import says
from support.screen.demo_app import demo_app, toasts, visible_text, wait_until
from support.screen.screen_driver import drive, press, real_app
from tui.screens.demo.server import FINISHED_RUN

pytestmark = pytest.mark.usefixtures("isolated_folder")
SIZE = (120, 24)


def test_delete_names_what_goes_and_moves_it_to_the_trash(demo_runs_folder: Path) -> None:
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
        await press(pilot, "down", "enter")
        await wait_until(pilot, lambda: not run.exists())
        await wait_until(pilot, lambda: FINISHED_RUN not in visible_text(pilot, "#all-runs"))

    drive(real_app(demo_runs_folder), act, SIZE)
    [trashed] = list_trash(demo_runs_folder)
    assert {path.name for path in trashed.path.iterdir()} - {".lock"} == files


def test_demo_changes_no_run(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j", "D", "A")
        assert [says(toast, "not-supported") for toast in toasts(pilot)] == [True] * 2
        assert (demo_runs_folder / FINISHED_RUN).exists()

    drive(demo_app(demo_runs_folder), act, SIZE)
