"""The screen of a process, and what enter on a process opens, over real processes and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.watch.process import ProcessId
from support.messages import says
from support.replace import replace
from support.screen.demo_app import (
    FROZEN_NOW,
    demo_app,
    demo_snapshot,
    toasts,
    visible_text,
    wait_until,
    wait_until_idle,
)
from support.screen.screen_driver import drive, press, real_app
from tui.screens.app import GputrainApp
from tui.screens.monitor import MonitorScreen
from tui.screens.process import ProcessScreen
from tui.screens.run import RunScreen
from tui.screens.tables.process import LoadScale
from tui.screens.widgets.lines import Lines

pytestmark = pytest.mark.usefixtures("isolated_folder")
HOLD = "import sys; file = open('metrics.csv', 'a'); file.write('step,loss\\n1,0.5\\n'); file.flush(); print('step 1', file=sys.stderr, flush=True); print(flush=True); sys.stdin.read()"  # noqa: E501


def app_of(pilot: Pilot[None]) -> GputrainApp:
    assert isinstance(pilot.app, GputrainApp)
    return pilot.app


def test_process_screen_shows_the_tree_and_opens_its_only_run(tmp_path: Path) -> None:
    with (
        (tmp_path / "job.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-S", "-c", HOLD],
            cwd=tmp_path,
            # What other tests have set would push the open files out of view.
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
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
            assert "growing" in visible_text(pilot, "#written") and "metrics.csv" in visible_text(pilot, "#written")
            assert "open files" in visible_text(pilot, "#details")
            process.communicate()
            screen.poller.request_poll()
            await wait_until(
                pilot, lambda: screen.poller.latest is not None and screen.poller.latest.ended_at is not None
            )
            screen.update_content()
            await wait_until_idle(pilot)
            assert "ended" in visible_text(pilot, "#status") and "ended" in visible_text(pilot, "#written")

        drive(real_app(tmp_path / "runs"), act, (120, 30))


def open_shown(pilot: Pilot[None], pid: int, *, shown_pid: int | None = None) -> None:
    """Open a process that the monitor shows."""
    monitor, gpu = pilot.app.screen, demo_snapshot(FROZEN_NOW).gpus[0]
    assert isinstance(monitor, MonitorScreen)
    known = replace((gpu.processes.value or ())[0], run=None)
    monitor.show_process_rows([(gpu, replace(known, pid=shown_pid or pid))], "Processes", "")
    monitor.open_process(replace(known, pid=pid))


def test_process_that_is_not_the_one_shown_is_not_opened(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        open_shown(pilot, os.getpid(), shown_pid=1)
        await wait_until(pilot, lambda: bool(toasts(pilot)))
        assert says(toasts(pilot)[-1], "not-found", "has ended, or runs in another container")

    drive(real_app(tmp_path / "runs"), act, (120, 30), notifications=True)


def test_process_of_a_run_of_gputrain_opens_its_own_screen(tmp_path: Path, demo_runs_folder: Path) -> None:
    folder = next(path for path in demo_runs_folder.iterdir() if (path / "owner.json").exists())
    with (folder / "events.jsonl").open("a"):

        async def act(pilot: Pilot[None]) -> None:
            open_shown(pilot, os.getpid())
            await wait_until(pilot, lambda: isinstance(pilot.app.screen, RunScreen), 10.0)
            await wait_until_idle(pilot)

        drive(real_app(demo_runs_folder), act, (120, 30))


def test_process_without_a_run_opens_its_page_with_command_variables_and_past(tmp_path: Path) -> None:
    line = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()", "--token", "hidden-word"]
    environment = {"CUDA_VISIBLE_DEVICES": "0,3", "WANDB_API_KEY": "hidden-word", "EDITOR": "vi"}
    with subprocess.Popen(line, cwd=tmp_path, stdin=subprocess.PIPE, env=environment) as process:

        async def act(pilot: Pilot[None]) -> None:
            open_shown(pilot, process.pid)
            await wait_until(pilot, lambda: isinstance(pilot.app.screen, ProcessScreen), 10.0)
            await wait_until(pilot, lambda: "0,3" in visible_text(pilot))
            await wait_until(pilot, lambda: "%" in str(pilot.app.screen.query_one("#cpu", Lines).border_title))
            shown = visible_text(pilot)
            assert str(tmp_path)[:20] in shown and "EDITOR" not in shown and "hidden-word" not in shown
            process.communicate()

        drive(real_app(tmp_path / "runs"), act, (160, 48))


def test_simulated_process_opens_no_page(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        open_shown(pilot, os.getpid())
        await wait_until(pilot, lambda: bool(toasts(pilot)))
        assert toasts(pilot)[-1] == "Demo mode: this process is simulated"

    drive(demo_app(tmp_path / "runs"), act, (120, 30), notifications=True)


def test_scale_of_a_graph_ends_above_the_highest_value_or_at_the_memory_of_the_gpus() -> None:
    gpu = demo_snapshot(FROZEN_NOW).gpus[0]
    process = (gpu.processes.value or ())[0]
    cpu = LoadScale.fit("cpu", 150.0, [None, 210.0, 150.0], [(gpu, process)])
    assert (cpu.title, cpu.label, cpu.percent([None, 150.0])) == ("CPU 150%", "300", [None, 50.0])
    assert LoadScale.fit("memory", 3 << 30, [3 << 30], []).label == "4G"
    assert LoadScale.fit("gpu_memory", None, [None], [(gpu, process)]).label == "80G"
