"""The screen of a sweep: its trials by value, live, and the runs behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.runs.sweeps import make_finished_trials
from support.screen.demo_app import visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, open_sweep, press, real_app
from tui.screens.run import RunScreen
from tui.screens.sweep import SweepScreen
from tui.widgets.lines import Lines


def trial_numbers(pilot: Pilot[None]) -> list[int]:
    lines = visible_text(pilot, "#trials").splitlines()[2:]
    return [int(line[5:10]) for line in lines if line[5:10].strip().isdigit()]


@pytest.mark.usefixtures("isolated_folder")
def test_sweep_screen_sorts_trials_follows_them_and_opens_their_runs(tmp_path: Path) -> None:
    _, study = make_finished_trials(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        screen = await open_sweep(pilot)
        assert trial_numbers(pilot) == [2, 7, 0, 4, 1, 6, 8, 3, 5]
        study.end(8, "COMPLETE", 0.99)
        screen.sweep_poller.request_poll()
        await wait_until(pilot, lambda: screen.sweep_poller.value.counts["complete"] == 7)  # type: ignore[union-attr]
        await wait_until(pilot, lambda: trial_numbers(pilot)[0] == 8)
        screen.query_one("#trials", Lines).select_key("4")
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, RunScreen) and pilot.app.screen.folder.name == "s-004"

    drive(real_app(tmp_path / "runs"), act, size=(120, 34))


@pytest.mark.usefixtures("isolated_folder")
def test_sweep_screen_selects_the_trial_and_stops_the_sweep(tmp_path: Path) -> None:
    folder, _ = make_finished_trials(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        pilot.app.open_sweep("s-007")  # type: ignore[attr-defined]
        await pilot.pause()
        await wait_until_idle(pilot)
        screen = pilot.app.screen
        assert isinstance(screen, SweepScreen)
        assert screen.query_one("#trials", Lines).selected_key == "7"
        assert not screen.is_available("stop")
        with folder.controller_lock():
            screen.sweep_poller.request_poll()
            await wait_until(pilot, lambda: screen.is_available("stop"))
            await press(pilot, "s", "down", "enter")
        requests = [json.loads(path.read_text()) for path in folder.control.glob("*.json")]
        assert [request["request"] for request in requests] == ["stop"]

    drive(real_app(tmp_path / "runs"), act)
