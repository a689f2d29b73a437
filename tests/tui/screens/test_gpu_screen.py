"""The screen of one GPU, driven by keys and mouse."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.gpus.snapshot import GpuProcess, Measurement, Snapshot
from support.messages import says
from support.replace import replace
from support.screen.demo_app import (
    FROZEN_NOW,
    FrozenGpuFeed,
    demo_app,
    demo_snapshot,
    toasts,
    visible_text,
    wait_until_idle,
)
from support.screen.screen_driver import drive, press
from tui.screens.dialogs import ChoiceDialog
from tui.screens.gpu import GpuScreen
from tui.screens.run import RunScreen

SIZE = (160, 48)

pytestmark = pytest.mark.usefixtures("isolated_folder")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def process_of(pid: int, number: int = 0) -> GpuProcess:
    def known(value: Any) -> Measurement[Any]:
        return Measurement(value, FROZEN_NOW)

    # The more memory, the higher in the list.
    return GpuProcess(
        pid=pid,
        kind="compute",
        instance=None,
        user=known("me"),
        command=known(f"sleep {number}"),
        gpu_memory=known((100 - number) << 20),
        cpu=known(1.0),
        memory=known(1),
    )


def snapshot_with(*processes: GpuProcess) -> Snapshot:
    """The demo's GPUs, and these processes on the first one."""
    snapshot = demo_snapshot(FROZEN_NOW)
    first = replace(snapshot.gpus[0], processes=Measurement(processes, FROZEN_NOW))
    return replace(snapshot, gpus=(first, *snapshot.gpus[1:]))


def title(pilot: Pilot[None]) -> str:
    return visible_text(pilot, "#title")


def test_gpu_screen_leaves_the_layout_of_the_monitor_as_it_was(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        before = visible_text(pilot, "#processes")
        await press(pilot, "enter", "escape")
        assert visible_text(pilot, "#processes") == before

    drive(demo_app(demo_runs_folder), act, (80, 24))


def test_gpu_screen_shows_previous_and_next_gpu_and_picks_it(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        # A burst of keys.
        await pilot.press("right", "right_square_bracket", "right", "left")
        await wait_until_idle(pilot)
        assert "GPU 2 " in title(pilot)
        await press(pilot, "left_square_bracket", "left", "left")
        assert "GPU 7 " in title(pilot)
        await press(pilot, "right", "right", "space")
        assert "GPU 1 (selected)" in title(pilot)
        assert "space unselect" in visible_text(pilot, "Keys")
        await press(pilot, "n")
        assert "--gpus 1" in visible_text(pilot, "#command")

    drive(demo_app(demo_runs_folder), act, SIZE)


def test_gpu_screen_opens_run_of_process(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "enter")
        assert isinstance(pilot.app.screen, RunScreen)
        assert pilot.app.screen.folder.name == "fashion-17"
        await press(pilot, "escape", *["right"] * 4)
        assert "open run" not in visible_text(pilot, "Keys")
        await press(pilot, "enter")
        assert "Demo mode: this process is simulated" in toasts(pilot)

    drive(demo_app(demo_runs_folder), act, SIZE)


def test_gpu_screen_signals_process_only_if_chosen(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "ctrl+k")
        assert isinstance(pilot.app.screen, ChoiceDialog)
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, GpuScreen)
        assert sleeper.poll() is None
        await press(pilot, "ctrl+k", "down", "enter")
        assert sleeper.wait(5) == -signal.SIGTERM

    feed = FrozenGpuFeed(snapshot_with(process_of(sleeper.pid)))
    drive(demo_app(tmp_path / "runs", feed, demo=None), act, SIZE)


def test_gpu_screen_keeps_last_readings_of_silent_gpu(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "end", "enter")
        assert "no answer for 4s; these are its last readings" in visible_text(pilot, "#facts")
        assert visible_text(pilot, "#power").count("⣿") > 100

    drive(demo_app(demo_runs_folder), act, SIZE)


def test_gpu_screen_of_gpu_that_disappears(demo_runs_folder: Path) -> None:
    feed = FrozenGpuFeed(demo_snapshot(FROZEN_NOW))

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "left")
        assert feed.snapshot is not None
        feed.snapshot = replace(feed.snapshot, gpus=feed.snapshot.gpus[:7])
        await wait_until_idle(pilot)
        assert says(visible_text(pilot, "#facts"), "gpu-not-found")
        await press(pilot, "right")
        assert "GPU 1 " in title(pilot)

    drive(demo_app(demo_runs_folder, feed), act, SIZE)
