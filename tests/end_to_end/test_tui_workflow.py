"""The workflow of a new user with a real run: configure, start, watch, detach, attach, stop, resume."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.runs.folder import RunState
from support.gputrain_command import Gputrain, read_events
from support.screen.demo_app import no_gpu_feed, visible_text, wait_until
from tui.app import GputrainApp
from tui.screens.monitor import MonitorScreen
from tui.screens.run import RunScreen
from tui.screens.starting import StartingScreen

PATIENCE = 60.0
TYPED = (("model.name", "linear"), ("run.epochs", "100000"), ("run.name", "mine"), ("device.ranks", "1"))


async def set_field(pilot: Pilot[None], key: str, text: str) -> None:
    screen: Any = pilot.app.screen
    screen.fields.select(key)
    await pilot.press(*text)


def run_screen(pilot: Pilot[None]) -> RunScreen:
    screen = pilot.app.screen
    assert isinstance(screen, RunScreen)
    return screen


@pytest.fixture
def kill_leftover_runs(gputrain: Gputrain) -> Iterator[None]:
    """Kill the runs of a test that failed halfway, because they would never end."""
    yield
    for process in gputrain.processes():
        process.kill()


@pytest.mark.expensive("a run that the screen starts, a second screen, and a resume")
@pytest.mark.usefixtures("kill_leftover_runs")
def test_tui_workflow_start_watch_detach_attach_stop_and_resume(
    gputrain: Gputrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in gputrain.environment.items():
        monkeypatch.setenv(name, value)

    def app(run: str | None = None) -> GputrainApp:
        return GputrainApp(gputrain.runs, gpu_poller=no_gpu_feed(), initial_run=gputrain.runs / run if run else None)

    async def start() -> None:
        async with app().run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            await pilot.press("n")
            await pilot.pause()
            for key, text in TYPED:
                await set_field(pilot, key, text)
            await wait_until(pilot, lambda: "ready to start" in visible_text(pilot, "#title"), PATIENCE)
            assert "1 CPU rank" in visible_text(pilot, "#plan")
            await pilot.press("ctrl+s")
            await wait_until(pilot, lambda: isinstance(pilot.app.screen, RunScreen), PATIENCE)
            assert [type(screen) for screen in pilot.app.screen_stack] == [MonitorScreen, RunScreen]
            await wait_until(
                pilot, lambda: len(run_screen(pilot).data.epoch_metric("val_loss", "step").y) > 3, PATIENCE
            )
            await wait_until(pilot, lambda: "● training" in visible_text(pilot, "#progress"))
            before = run_screen(pilot).data.last_step
            await wait_until(pilot, lambda: run_screen(pilot).data.last_step > before)
            await wait_until(pilot, lambda: "val 0" in visible_text(pilot, "#accuracy"))
            await pilot.press("q")

    asyncio.run(start())
    [row] = json.loads(gputrain("runs", "--json").stdout)["runs"]
    assert (row["name"], row["state"]) == ("mine", "running")

    async def attach() -> None:
        async with app("mine").run_test(size=(100, 30)) as pilot:
            await wait_until(pilot, lambda: run_screen(pilot).state is RunState.RUNNING)
            await wait_until(pilot, lambda: len(run_screen(pilot).data.train_loss("step").y) > 0)
            assert run_screen(pilot).data.train_loss("step").y[0] > 0, "the curve starts at the first step"
            await pilot.press("p")
            await wait_until(pilot, lambda: run_screen(pilot).state is RunState.PAUSED, PATIENCE)
            await pilot.press("s", "down", "enter")
            await wait_until(pilot, lambda: run_screen(pilot).state is RunState.STOPPED, PATIENCE)
            stopped_at = read_events(gputrain.runs / "mine")[-2]["step"]
            await pilot.press("u")
            await wait_until(pilot, lambda: isinstance(pilot.app.screen, StartingScreen))
            await wait_until(pilot, lambda: isinstance(pilot.app.screen, RunScreen), PATIENCE)
            await wait_until(pilot, lambda: run_screen(pilot).data.last_step > stopped_at + 100, PATIENCE)
            assert len(pilot.app.screen_stack) == 2
            await pilot.press("q")

    asyncio.run(attach())
    assert gputrain("stop", "mine").stderr == "mine is stopped.\n"
    steps = [event["step"] for event in read_events(gputrain.runs / "mine") if event["type"] == "step"]
    assert steps == list(range(10, steps[-1] + 1, 10))


def test_tui_workflow_returns_to_form_when_run_is_rejected(gputrain: Gputrain, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gputrain.environment.items():
        monkeypatch.setenv(name, value)

    async def drive() -> None:
        app = GputrainApp(gputrain.runs, gpu_poller=no_gpu_feed())
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            await pilot.press("n")
            await pilot.pause()
            await set_field(pilot, "run.name", "taken")
            await wait_until(pilot, lambda: "ready to start" in visible_text(pilot, "#title"), PATIENCE)
            # After the form has checked the name.
            (gputrain.runs / "taken").mkdir(parents=True)
            await pilot.press("ctrl+s")
            await wait_until(pilot, lambda: "✗ not started" in visible_text(pilot), PATIENCE)
            assert "taken already exists" in " ".join(visible_text(pilot).split())
            await pilot.press("escape")
            await pilot.pause()
            assert "--name taken" in visible_text(pilot, "#command")

    asyncio.run(drive())
