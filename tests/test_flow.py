"""The way of a new user, with a real run: choose, start, watch, leave, come back, stop, go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cockpit import text_of, until, without_gpu
from conftest import Gputrain, events_of
from textual.pilot import Pilot

from engine.runs.folder import RunState
from tui.app import GputrainApp
from tui.screens.monitor import MonitorScreen
from tui.screens.run import RunScreen
from tui.screens.starting import StartingScreen

PATIENCE = 60.0
TYPED = (("model.name", "linear"), ("run.epochs", "100000"), ("run.name", "mine"), ("device.ranks", "1"))


async def set_field(pilot: Pilot[None], key: str, text: str) -> None:
    screen: Any = pilot.app.screen
    screen.query_one(f"#field-{key.replace('.', '-')}").control.value = text
    await pilot.pause()


def run_screen(pilot: Pilot[None]) -> RunScreen:
    screen = pilot.app.screen
    assert isinstance(screen, RunScreen)
    return screen


@pytest.fixture
def no_run_left(gputrain: Gputrain) -> Iterator[None]:
    """A test that fails on its way must not leave a run that would not end."""
    yield
    for process in gputrain.processes():
        process.kill()


@pytest.mark.usefixtures("no_run_left")
def test_choose_start_watch_leave_come_back_stop_and_go_on(gputrain: Gputrain, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gputrain.environment.items():
        monkeypatch.setenv(name, value)

    def app(run: str | None = None) -> GputrainApp:
        return GputrainApp(gputrain.runs, gpu_poller=without_gpu(), initial_run=gputrain.runs / run if run else None)

    async def start() -> None:
        async with app().run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            await pilot.press("n")
            await pilot.pause()
            for key, text in TYPED:
                await set_field(pilot, key, text)
            await until(pilot, lambda: "ready to start" in text_of(pilot, "#title"), PATIENCE)
            assert "1 process on the CPU" in text_of(pilot, "#plan")
            await pilot.press("ctrl+s")
            await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen), PATIENCE)
            assert [type(screen) for screen in pilot.app.screen_stack] == [MonitorScreen, RunScreen]
            await until(pilot, lambda: len(run_screen(pilot).data.epoch_metric("val_loss", "step").y) > 3, PATIENCE)
            await until(pilot, lambda: "● training" in text_of(pilot, "#progress"))
            before = run_screen(pilot).data.last_step
            await until(pilot, lambda: run_screen(pilot).data.last_step > before)
            await until(pilot, lambda: "val 0" in text_of(pilot, "#accuracy"))
            await pilot.press("q")

    asyncio.run(start())
    [row] = json.loads(gputrain("runs", "--json").stdout)["runs"]
    assert (row["name"], row["state"]) == ("mine", "running")

    async def come_back() -> None:
        async with app("mine").run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: run_screen(pilot).state is RunState.RUNNING)
            await until(pilot, lambda: len(run_screen(pilot).data.train_loss("step").y) > 0)
            assert run_screen(pilot).data.train_loss("step").y[0] > 0, "the history from its first step"
            await pilot.press("p")
            await until(pilot, lambda: run_screen(pilot).state is RunState.PAUSED, PATIENCE)
            await pilot.press("s", "down", "enter")
            await until(pilot, lambda: run_screen(pilot).state is RunState.STOPPED, PATIENCE)
            stopped_at = events_of(gputrain.runs / "mine")[-2]["step"]
            await pilot.press("u")
            await until(pilot, lambda: isinstance(pilot.app.screen, StartingScreen))
            await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen), PATIENCE)
            await until(pilot, lambda: run_screen(pilot).data.last_step > stopped_at + 100, PATIENCE)
            assert len(pilot.app.screen_stack) == 2
            await pilot.press("q")

    asyncio.run(come_back())
    assert gputrain("stop", "mine").stderr == "mine is stopped.\n"
    steps = [event["step"] for event in events_of(gputrain.runs / "mine") if event["type"] == "step"]
    assert steps == list(range(10, steps[-1] + 1, 10))


def test_a_run_that_is_refused_brings_the_choices_back(gputrain: Gputrain, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gputrain.environment.items():
        monkeypatch.setenv(name, value)
    (gputrain.runs / "taken").mkdir(parents=True)

    async def drive() -> None:
        app = GputrainApp(gputrain.runs, gpu_poller=without_gpu())
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            await pilot.press("n")
            await pilot.pause()
            await set_field(pilot, "run.name", "taken")
            await until(pilot, lambda: "ready to start" in text_of(pilot, "#title"), PATIENCE)
            await pilot.press("ctrl+s")
            await until(pilot, lambda: "not started" in text_of(pilot), PATIENCE)
            assert "the run taken exists" in " ".join(text_of(pilot).split())
            await pilot.press("escape")
            await pilot.pause()
            assert "--name taken" in text_of(pilot, "#command")

    asyncio.run(drive())
