"""The screen of a sweep: its trials by value, live, and the runs behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.jobs.sweeps.folder import SweepFolder
from support.runs.sweeps import make_finished_trials
from support.screen.demo_app import toasts, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, open_sweep, press, real_app
from tui.screens.app import GputrainApp
from tui.screens.compare import CompareScreen
from tui.screens.run import RunScreen
from tui.screens.sweep import SweepScreen
from tui.screens.widgets.lines import Lines


def trial_numbers(pilot: Pilot[None]) -> list[int]:
    lines = visible_text(pilot, "#trials").splitlines()[2:]
    return [int(line[5:10]) for line in lines if line[5:10].strip().isdigit()]


@pytest.mark.usefixtures("isolated_folder")
def test_sweep_screen_draws_the_selected_trial_sorts_and_follows_trials_and_opens_their_runs(tmp_path: Path) -> None:
    _, study = make_finished_trials(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        screen = await open_sweep(pilot)
        assert "trial 2, others dashed" in visible_text(pilot, "#trial-curves")
        chart = visible_text(pilot, "#param-chart")
        assert "best val acc by optim." in chart
        # The cursor is at the best trial. The other star is in the legend.
        assert chart.count("★") == 2
        screen.query_one("#trials", Lines).select_key("4")
        await press(pilot, "tab")
        assert "trial 4, others dashed" in visible_text(pilot, "#trial-curves")
        shown = visible_text(pilot, "#params")
        assert "trial 4" in shown and "0.007" in shown and "0.07" in shown and "%" in shown
        screen.query_one("#params", Lines).select_key("optim.name")
        await press(pilot)
        await wait_until(pilot, lambda: "adamw" in visible_text(pilot, "#param-chart"))
        assert trial_numbers(pilot) == [2, 7, 0, 4, 1, 6, 8, 3, 5]
        study.end(8, "COMPLETE", 0.99)
        screen.sweep_poller.request_poll()
        await wait_until(pilot, lambda: screen.sweep_poller.value.counts["complete"] == 7)  # type: ignore[union-attr]
        await wait_until(pilot, lambda: trial_numbers(pilot)[0] == 8)
        screen.query_one("#trials", Lines).focus()
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


@pytest.mark.usefixtures("isolated_folder")
def test_sweep_screen_selects_and_compares_trials_and_trains_the_best_config_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = make_finished_trials(tmp_path / "runs")
    started: list[list[str]] = []
    monkeypatch.setattr(GputrainApp, "launch", lambda self, arguments: started.append(list(arguments)))

    async def act(pilot: Pilot[None]) -> None:
        await open_sweep(pilot)
        await press(pilot, "a")
        assert "--epochs 50 --name s-best" in " ".join(visible_text(pilot).split())
        await press(pilot, "enter")
        assert started == []
        await press(pilot, "a", "down", "enter")
        assert started == [["run", str(folder.best), "--epochs", "50", "--name", "s-best", "--headless"]]
        await press(pilot, "c")
        assert "Select two trials" in toasts(pilot)[-1]
        await press(pilot, "space", "space")
        assert visible_text(pilot, "#trials").count("◆") == 2 and "2 selected" in visible_text(pilot, "#trials")
        await press(pilot, "c")
        screen = pilot.app.screen
        assert isinstance(screen, CompareScreen)
        await wait_until(pilot, lambda: [run.run.name for run in screen.compare_poller.runs] == ["s-002", "s-007"])

    drive(real_app(tmp_path / "runs"), act, size=(160, 48))


@pytest.mark.usefixtures("isolated_folder")
def test_sweep_screen_resumes_a_stopped_sweep_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_finished_trials(tmp_path / "runs")
    called: list[tuple[object, ...]] = []
    monkeypatch.setattr("tui.screens.sweep.call_gputrain", lambda *arguments: called.append(arguments))

    async def act(pilot: Pilot[None]) -> None:
        screen = await open_sweep(pilot)
        with screen.folder.controller_lock():
            screen.sweep_poller.request_poll()
            await wait_until(pilot, lambda: not screen.is_available("resume"))
        screen.sweep_poller.request_poll()
        await wait_until(pilot, lambda: screen.is_available("resume"))
        await press(pilot, "u")
        await wait_until(pilot, lambda: "s goes on in the background" in toasts(pilot)[-1:])
        assert called == [(("sweep", "resume", "s", "--detach"), tmp_path / "runs")]

    drive(real_app(tmp_path / "runs"), act)


@pytest.mark.usefixtures("isolated_folder")
def test_sweep_screen_cuts_neither_the_best_trial_nor_its_keys(tmp_path: Path) -> None:
    make_finished_trials(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        await open_sweep(pilot)
        shown = "".join(visible_text(pilot, "#sweep-status").split())
        assert "bestvalacc0.9500intrial2" in shown
        assert "atrainsitlonger" in shown and "uresumesit" in shown

    drive(real_app(tmp_path / "runs"), act, size=(60, 20))


@pytest.mark.usefixtures("isolated_folder")
def test_sweep_screen_claims_nothing_about_trials_that_it_has_not_read(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        pilot.app.push_screen(SweepScreen(pilot.app, SweepFolder(tmp_path / "gone")))  # type: ignore[arg-type]
        await wait_until_idle(pilot)
        assert "not exist anymore" in " ".join(visible_text(pilot, "#sweep-status").split())
        assert "No trial" not in visible_text(pilot)

    drive(real_app(tmp_path / "runs"), act)
