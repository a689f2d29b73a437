"""Marks, filter, order and archive in the list of runs, driven by keys."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import demo_app, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, press_in_burst, real_app, type_keys
from tui.screens.app import GputrainApp
from tui.screens.compare import CompareScreen
from tui.screens.demo.server import FINISHED_RUN, LIVE_RUN
from tui.screens.monitor import MonitorScreen
from tui.screens.pollers.run_lists import RunListPoller
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.screens.widgets.lines import Lines

pytestmark = pytest.mark.usefixtures("isolated_folder")
WIDE = (160, 24)


def app_of(pilot: Pilot[None]) -> GputrainApp:
    assert isinstance(pilot.app, GputrainApp)
    return pilot.app


def shown_names(pilot: Pilot[None]) -> list[str]:
    """Names of the listed runs, in order."""
    return [Path(row.key).name for row in pilot.app.screen.query_one("#all-runs", Lines)._rows]


def header(pilot: Pilot[None]) -> str:
    return visible_text(pilot, "#all-runs").splitlines()[1]


async def type_filter(pilot: Pilot[None], text: str) -> None:
    """Open the filter and type a text."""
    names = {" ": "space", ".": "full_stop", "=": "equals_sign", ">": "greater_than_sign", "_": "underscore"}
    await type_keys(pilot, "slash", *(names.get(letter, letter) for letter in text))


def test_sweep_is_one_row_that_opens_and_is_marked_as_its_trials(demo_runs_folder: Path) -> None:
    (demo_runs_folder / "night").mkdir()
    (demo_runs_folder / "night" / "sweep.yaml").touch()
    trials = [f"night-{number:03d}" for number in range(2)]
    for trial in trials:
        shutil.copytree(demo_runs_folder / FINISHED_RUN, demo_runs_folder / trial)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        await type_filter(pilot, "night")
        await press(pilot, "enter")
        assert shown_names(pilot) == ["night"] and "○▸night " in visible_text(pilot, "#all-runs")
        assert "2 trials" in visible_text(pilot, "#all-runs") and "2 of 5 match" in visible_text(pilot, "#all-runs")
        await press(pilot, "enter")
        assert shown_names(pilot) == ["night", *trials] and "○▾night " in visible_text(pilot, "#all-runs")
        await press(pilot, "space")
        assert [Path(key).name for key in app_of(pilot).marked_runs] == trials
        await press(pilot, "k", "enter")
        assert shown_names(pilot) == ["night"] and "◆○▸night " in visible_text(pilot, "#all-runs")

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_space_marks_run_and_mark_survives_filter_order_and_screen(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j", "space")
        assert "◆○ digits-3" in visible_text(pilot, "#all-runs")
        assert "3 runs, 1 selected" in visible_text(pilot, "#all-runs")
        assert app_of(pilot).marked_runs == {str(demo_runs_folder / FINISHED_RUN): None}
        await type_filter(pilot, "cifar")
        assert "1 of 3 match 'cifar', 1 selected" in visible_text(pilot, "#all-runs")
        await press(pilot, "escape", "escape", "r")
        assert "◆○ digits-3" in visible_text(pilot, "#all-runs")
        await press(pilot, "j", "space")
        assert "◆" not in visible_text(pilot, "#all-runs")
        await press(pilot, "M")
        assert "3 runs, 3 selected" in visible_text(pilot, "#all-runs")
        await press(pilot, "M")
        assert app_of(pilot).marked_runs == {}

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_filter_applies_while_typing_and_keeps_list_for_mistake(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        await type_filter(pilot, "best_val_accuracy>0.9")
        assert shown_names(pilot) == [LIVE_RUN, FINISHED_RUN]
        await press(pilot, "x")
        # `says` finds no message with so few words beside its values.
        assert "best_val_accuracy: 0.9x " in visible_text(pilot, "#all-runs")
        assert shown_names(pilot) == [LIVE_RUN, FINISHED_RUN]
        await press(pilot, "backspace")
        assert "2 of 3 match 'best_val_accuracy>0.9'" in visible_text(pilot, "#all-runs")
        await type_keys(pilot, "enter", "slash", *["backspace"] * 30)
        assert len(shown_names(pilot)) == 3

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_order_sorts_by_chosen_column_and_again_the_other_way(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "o")
        assert "best val acc" in visible_text(pilot, ".dialog")
        await press(pilot, "enter")
        assert shown_names(pilot) == [FINISHED_RUN, LIVE_RUN, "cifar-4"]
        assert "best val acc▾" in header(pilot)
        await press(pilot, "o", "enter")
        assert shown_names(pilot) == ["cifar-4", LIVE_RUN, FINISHED_RUN]
        await press(pilot, "escape", "r")
        assert "best val acc▴" in header(pilot)

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_two_runs_are_compared_with_three_keys(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "space", "c")
        assert isinstance(pilot.app.screen, CompareScreen)
        assert "compare 2 runs" in visible_text(pilot, "#title")

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_newest_run_is_opened_and_resumed_with_two_keys(
    demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[str] = []
    monkeypatch.setattr(GputrainApp, "resume_run", lambda app, folder, state: resumed.append(folder.name))

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "u", "enter")
        assert isinstance(pilot.app.screen, RunScreen)
        assert resumed == [pilot.app.screen.name_of_run]

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_archive_of_several_runs_asks_with_their_names(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app_of(pilot).demo_notice = None
        await press(pilot, "r", "M", "A")
        question = visible_text(pilot)
        assert "Archive 3 runs?" in question and FINISHED_RUN in question and LIVE_RUN in question
        await press(pilot, "enter")
        assert "3 runs, 3 selected" in visible_text(pilot, "#all-runs")

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_archived_runs_are_hidden_until_asked_for(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "j", "A")
        await wait_until(pilot, lambda: FINISHED_RUN not in shown_names(pilot))
        assert "2 runs, 1 archived" in visible_text(pilot, "#all-runs")
        await type_filter(pilot, "archived=yes")
        assert shown_names(pilot) == [FINISHED_RUN]
        await press(pilot, "escape", "H")
        assert FINISHED_RUN in shown_names(pilot)
        await press(pilot, "j")
        assert "unarchive" in visible_text(pilot, "Keys")
        await press(pilot, "A", "H")
        await wait_until(pilot, lambda: FINISHED_RUN in shown_names(pilot))

    drive(real_app(demo_runs_folder), act, WIDE)


def test_keys_in_a_burst_mark_the_rows_they_were_typed_on(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        press_in_burst(pilot, "r", "j", "space", "j", "k", "k", "k", "space", "c")
        await wait_until_idle(pilot)
        assert [Path(key).name for key in app_of(pilot).marked_runs] == [FINISHED_RUN, LIVE_RUN]
        assert isinstance(pilot.app.screen, CompareScreen)

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_keys_in_a_burst_reach_the_dialog_that_their_first_key_opens(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        press_in_burst(pilot, "r", "o", "enter")
        await wait_until(pilot, lambda: "best val acc▾" in visible_text(pilot))

    drive(real_app(demo_runs_folder), act, WIDE)


def test_keys_typed_before_the_first_rows_wait_for_them(
    demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, is_released, read = demo_app(demo_runs_folder), threading.Event(), RunListPoller.poll_part

    def read_later(poller: RunListPoller) -> None:
        assert is_released.wait(30)
        read(poller)

    monkeypatch.setattr(RunListPoller, "poll_part", read_later)
    monkeypatch.setattr("tui.screens.app.MAX_CONTENT_WAIT_SECONDS", 30.0)

    async def main() -> None:
        async with app.run_test(size=WIDE) as pilot:
            press_in_burst(pilot, "r", "j", "space", "g", "space", "c")
            await wait_until(pilot, lambda: isinstance(app.screen, RunsScreen))
            is_released.set()
            await wait_until(pilot, lambda: isinstance(app.screen, CompareScreen))
            assert [Path(key).name for key in app.marked_runs] == [FINISHED_RUN, LIVE_RUN]

    asyncio.run(main())


def test_keys_reach_a_list_that_stays_empty(demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, is_released = demo_app(demo_runs_folder), threading.Event()
    monkeypatch.setattr(RunListPoller, "poll_part", lambda _: is_released.wait(30))
    monkeypatch.setattr("tui.screens.app.MAX_CONTENT_WAIT_SECONDS", 0.0)

    async def main() -> None:
        async with app.run_test(size=WIDE) as pilot:
            press_in_burst(pilot, "r", "j")
            await wait_until(pilot, lambda: isinstance(app.screen, RunsScreen))
            press_in_burst(pilot, "escape")
            await wait_until(pilot, lambda: isinstance(app.screen, MonitorScreen))
            is_released.set()

    asyncio.run(main())
