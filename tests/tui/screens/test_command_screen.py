"""The screen of the run of a command: charts of what it has, its log, its processes, and the requests that it sends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.jobs.command.metric_files import OWN_FILE
from engine.runs.events import ControlEvent
from engine.runs.folder import RunFolder, RunState
from engine.runs.ownership import Ownership
from engine.runs.run_record import read_run_record
from support.gputrain_command import GPUTRAIN, wait_for
from support.runs.command_folder import make_command_run
from support.screen.demo_app import FROZEN_NOW, demo_app, visible_text, wait_until
from support.screen.screen_driver import Drive, drive, press, real_app
from tui.screens.process import ProcessScreen
from tui.screens.run import RunScreen

ROWS = [{"loss": 1 / (step + 1), "lr": 0.1} for step in range(20)]

pytestmark = pytest.mark.usefixtures("isolated_folder")


def screen_of(pilot: Pilot[None]) -> RunScreen:
    assert isinstance(pilot.app.screen, RunScreen)
    return pilot.app.screen


def chart_titles(pilot: Pilot[None]) -> list[str]:
    return [chart.title for chart in screen_of(pilot).run_panels.chosen.values() if chart.metrics]


def show(root: Path, act: Drive, size: tuple[int, int] = (100, 30)) -> None:
    """Open the run `a` and call `act`."""
    drive(real_app(root, "a"), act, size, notifications=True)


def test_command_screen_shows_metrics_of_files_that_appear_later(tmp_path: Path) -> None:
    folder = make_command_run(tmp_path / "runs", "a", now=time.time(), rows=ROWS)
    owner = Ownership(folder)

    async def act(pilot: Pilot[None]) -> None:
        own = folder.metrics / OWN_FILE
        own.write_text('{"step": 1, "accuracy": 0.5}\n{"step": 2, "accuracy": 0.6}\n')
        await wait_until(pilot, lambda: "accuracy" in chart_titles(pilot))
        assert "loss" in chart_titles(pilot)

    show(tmp_path / "runs", act)
    owner.release()


def test_second_stop_of_a_command_is_asked_about_because_it_kills(tmp_path: Path) -> None:
    stop = ControlEvent(time=FROZEN_NOW - 1, request="stop", by="me", outcome="SIGINT sent")
    owner = Ownership(make_command_run(tmp_path / "runs", "a", stop, now=FROZEN_NOW))

    async def act(pilot: Pilot[None]) -> None:
        await wait_until(pilot, lambda: screen_of(pilot).state is RunState.STOPPING)
        await press(pilot, "s")
        assert "Kill the command" in visible_text(pilot)

    drive(demo_app(tmp_path / "runs", demo=None, run="a"), act)
    owner.release()


@pytest.fixture
def live_command(tmp_path: Path) -> Iterator[RunFolder]:
    """A command that prints and sleeps, supervised by another process."""
    script = "import time\nfor step in range(1000): print('step', step, 'loss', 1, flush=True); time.sleep(0.1)"
    arguments = ["run", "--headless", "--name", "a", "--runs-dir", str(tmp_path / "runs"), "--gpus", "cpu"]
    line = [GPUTRAIN, *arguments, "--", sys.executable, "-c", script]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as process:
        folder = RunFolder(tmp_path / "runs" / "a")
        wait_for(lambda: folder.log.exists() and "loss" in folder.log.read_text(), "output")
        yield folder
        process.kill()


def test_command_screen_shows_processes_and_stops_them(live_command: RunFolder) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await wait_until(pilot, lambda: "memory" in visible_text(pilot, "#progress"))
        await press(pilot, "T")
        assert isinstance(pilot.app.screen, ProcessScreen)
        await wait_until(pilot, lambda: "import time" in visible_text(pilot, "#tree"))
        await press(pilot, "escape", "s", "down", "enter")
        await wait_until(pilot, lambda: "stopped" in visible_text(pilot, "#progress"))
        assert screen_of(pilot).is_available("resume")

    show(live_command.path.parent, act, (120, 30))
    record = read_run_record(live_command)
    assert record is not None and record.state == "stopped"
