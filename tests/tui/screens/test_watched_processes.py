"""The screen of a process, and what enter on a process opens, over real processes and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.foreign.process import ProcessId
from support.messages import says
from support.replace import replace
from support.screen.demo_app import (
    FROZEN_NOW,
    demo_snapshot,
    toasts,
    visible_text,
    wait_until,
    wait_until_idle,
)
from support.screen.screen_driver import drive, press, real_app
from tui.app import GputrainApp
from tui.screens.gpu_processes import ProcessSignaler
from tui.screens.process import ProcessScreen
from tui.screens.run import RunScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")
HOLD = "import sys; file = open('metrics.csv', 'a'); file.write('step,loss\\n1,0.5\\n'); file.flush(); print('step 1', file=sys.stderr, flush=True); print(flush=True); sys.stdin.read()"  # noqa: E501


def app_of(pilot: Pilot[None]) -> GputrainApp:
    assert isinstance(pilot.app, GputrainApp)
    return pilot.app


def test_process_screen_shows_the_tree_and_opens_its_only_run(tmp_path: Path) -> None:
    with (
        (tmp_path / "job.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-S", "-c", HOLD], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        found = ProcessId.find(process.pid)
        assert found is not None

        async def act(pilot: Pilot[None]) -> None:
            app_of(pilot).open_process(found)
            await wait_until(pilot, lambda: isinstance(pilot.app.screen, RunScreen), 10.0)
            await wait_until_idle(pilot)
            assert f"pid {process.pid}" in visible_text(pilot, "#bottleneck")
            await press(pilot, "escape")
            screen = pilot.app.screen
            assert isinstance(screen, ProcessScreen)
            screen.update_content()
            await wait_until_idle(pilot)
            assert str(process.pid) in visible_text(pilot, "#tree") and "step 1" in visible_text(pilot, "#output")
            assert "growing" in visible_text(pilot, "#written")
            process.communicate()
            screen.poller.request_poll()
            await wait_until(
                pilot, lambda: screen.poller.latest is not None and screen.poller.latest.ended_at is not None
            )
            screen.update_content()
            await wait_until_idle(pilot)
            assert "ended" in visible_text(pilot, "#status") and "ended" in visible_text(pilot, "#written")

        drive(real_app(tmp_path / "runs"), act, (120, 30))


def watch_shown(pilot: Pilot[None], pid: int, nothing: str, *, shown_pid: int | None = None) -> None:
    """Open what a process writes that a screen shows."""
    signaler = ProcessSignaler(app_of(pilot))
    known = next(process for gpu in demo_snapshot(FROZEN_NOW).gpus for process in gpu.processes.value or ())
    signaler.remember([replace(known, pid=shown_pid or pid)])
    signaler.watch(app_of(pilot).screen, pid, nothing)


def test_process_that_is_not_the_one_shown_is_not_opened(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        watch_shown(pilot, os.getpid(), "nothing", shown_pid=1)
        await wait_until(pilot, lambda: bool(toasts(pilot)))
        assert says(toasts(pilot)[-1], "not-found", "has ended, or runs in another container")

    drive(real_app(tmp_path / "runs"), act, (120, 30), notifications=True)


def test_process_of_a_run_of_gputrain_opens_its_own_screen(tmp_path: Path, demo_runs_folder: Path) -> None:
    folder = next(path for path in demo_runs_folder.iterdir() if (path / "owner.json").exists())
    with (folder / "events.jsonl").open("a"):

        async def act(pilot: Pilot[None]) -> None:
            watch_shown(pilot, os.getpid(), "nothing")
            await wait_until(pilot, lambda: isinstance(pilot.app.screen, RunScreen), 10.0)
            await wait_until_idle(pilot)

        drive(real_app(demo_runs_folder), act, (120, 30))
