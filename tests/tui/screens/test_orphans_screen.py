"""The screen of the orphans, and how the monitor names who holds a GPU without using it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.command.orphans import Orphans
from engine.utils.process_table import ProcessId
from support.messages import says
from support.runs.torchrun_orphans import WORKER, adopting_orphans, kill_agent, start_agent
from support.screen.demo_app import demo_app, toasts, visible_text, wait_until
from support.screen.screen_driver import drive, press, real_app
from tui.screens.dialogs import ChoiceDialog
from tui.screens.monitor import MonitorScreen
from tui.screens.orphans import OrphansScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")


# Another port than those of tests that run at the same time.
VARIABLES = WORKER | {"MASTER_PORT": "29717"}


@pytest.fixture
def orphan() -> Iterator[ProcessId]:
    with adopting_orphans("tini"), start_agent(**VARIABLES) as (agent, worker):
        kill_agent(agent, worker)
        found = ProcessId.find(worker)
        assert found is not None
        yield found


def test_orphans_are_listed_with_one_key_and_ended_with_another_after_a_question(
    demo_runs_folder: Path, orphan: ProcessId
) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await select(pilot, orphan)
        assert str(orphan.pid) in visible_text(pilot, "#orphans") and "sleep 600" in visible_text(pilot, "#orphans")
        for answer, is_kept in (("enter", True), ("down enter", False)):
            await press(pilot, "E")
            assert isinstance(pilot.app.screen, ChoiceDialog)
            await press(pilot, *answer.split())
            await wait_until(pilot, lambda kept=is_kept: orphan.is_running() is kept)
        await wait_until(pilot, lambda: any("ended" in toast for toast in toasts(pilot)))

    drive(real_app(demo_runs_folder), act)


async def select(pilot: Pilot[None], orphan: ProcessId) -> OrphansScreen:
    """Open the screen, and move to the group of an orphan."""
    await press(pilot, "o")
    screen = pilot.app.screen
    assert isinstance(screen, OrphansScreen)
    await wait_until(pilot, lambda: any(_has(group, orphan) for group in screen.groups))
    screen.update_content()
    place = next(place for place, group in enumerate(screen.groups) if _has(group, orphan))
    for _ in range(sum(1 + len(group.processes) for group in screen.groups[:place])):
        await press(pilot, "down")
    return screen


def test_key_ends_only_orphans_that_were_shown(demo_runs_folder: Path, orphan: ProcessId) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await select(pilot, orphan)
        await press(pilot, "E")
        with start_agent(**VARIABLES) as (agent, worker):
            # One of the same torchrun that becomes an orphan while the question is asked.
            kill_agent(agent, worker)
            later = ProcessId.find(worker)
            await press(pilot, "down", "enter")
            await wait_until(pilot, lambda: any("ended" in toast for toast in toasts(pilot)))
            assert not orphan.is_running() and later is not None and later.is_running()

    drive(real_app(demo_runs_folder), act)


def _has(group: Orphans, process: ProcessId) -> bool:
    return any(each.id == process for each in group.processes)


def test_demo_has_no_orphans(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "o")
        assert isinstance(pilot.app.screen, MonitorScreen)
        assert says("\n".join(toasts(pilot)), "not-supported")

    drive(demo_app(demo_runs_folder), act)
