"""SVG snapshots of the dialogs, of the start of a run, and of the confusion matrix."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from textual.pilot import Pilot

from demo_app import demo_app, demo_runs, wait_until, wait_until_idle
from screen_snapshots import Compare, Size, matches_snapshot, size_name
from tui.demo.server import FINISHED_RUN, LIVE_RUN
from tui.launcher import LaunchedRun
from tui.screens.dialogs import ConfigDialog
from tui.screens.starting import StartingScreen

SIZES = [(80, 24), (160, 48)]
REFUSAL = """warning: GPU 0 is also used by bob, with 11.0 GiB
error: device.gpus: torch 2.14.1 cannot use GPU 0 (sm_30): it supports sm_75 and later
  train on other GPUs with --gpus, or on the CPU with --gpus cpu
"""

pytestmark = [pytest.mark.usefixtures("frozen_environment"), pytest.mark.parametrize("size", SIZES, ids=size_name)]


def test_help(snap_compare: Compare, size: Size) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), size, "r question_mark")


def test_log(snap_compare: Compare, size: Size) -> None:
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=LIVE_RUN), size, "l slash 1 enter N")
    owners[0].release()


def test_config(snap_compare: Compare, size: Size) -> None:
    demo_runs(Path("runs"))[0].release()

    async def open_config(pilot: Pilot[None]) -> None:
        await pilot.press("d")
        dialog = pilot.app.screen
        assert isinstance(dialog, ConfigDialog)
        await wait_until(pilot, lambda: len(dialog._lines) > 1)
        await wait_until_idle(pilot)

    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=FINISHED_RUN), size, before=open_config)


def test_start_that_was_refused(snap_compare: Compare, size: Size) -> None:
    with tempfile.TemporaryFile() as output:
        output.write(REFUSAL.encode())
        output.flush()
        process = SimpleNamespace(pid=1, poll=lambda: 2)
        launched = LaunchedRun(process, output, Path("runs"), None, 0.0)  # type: ignore[arg-type]
        app = demo_app(Path("runs"), demo=None)

        async def open_start(pilot: Pilot[None]) -> None:
            app.push_screen(StartingScreen(app, launched))
            await pilot.pause()
            await wait_until_idle(pilot)

        assert matches_snapshot(snap_compare, app, size, before=open_start)
