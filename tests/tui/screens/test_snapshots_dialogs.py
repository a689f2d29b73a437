"""SVG snapshots of the dialogs, of the start of a run, and of the confusion matrix."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.jobs.launch.detached import LaunchedRun
from engine.runs.folder import RunFolder
from support.json_files import write_json
from support.screen.demo_app import demo_app, demo_runs, wait_until, wait_until_idle
from support.screen.screen_snapshots import Compare, matches_snapshot
from tui.screens.demo.server import FINISHED_RUN, LIVE_RUN
from tui.screens.dialogs import TextDialog

REFUSAL = """warning: GPU 0 is also used by bob, with 11.0 GiB
error: device.gpus: torch 2.14.1 cannot use GPU 0 (sm_30): it supports sm_75 and later
  train on other GPUs with --gpus, or on the CPU with --gpus cpu
"""

pytestmark = pytest.mark.usefixtures("frozen_environment")


def test_help(snap_compare: Compare) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), "r question_mark")


def test_log(snap_compare: Compare, live_demo_runs: Path) -> None:
    assert matches_snapshot(snap_compare, demo_app(live_demo_runs, run=LIVE_RUN), "l")


def test_config(snap_compare: Compare) -> None:
    demo_runs(Path("runs"))[0].release()

    async def open_config(pilot: Pilot[None]) -> None:
        await pilot.press("d")
        dialog = pilot.app.screen
        assert isinstance(dialog, TextDialog)
        await wait_until(pilot, lambda: len(dialog._lines) > 1)
        await wait_until_idle(pilot)

    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=FINISHED_RUN), before=open_config)


def write_evaluation(path: Path) -> None:
    """Write an evaluation of ten classes, in which 4 and 9 are confused most."""
    counts = [[(row * 7 + column * 3) % 4 * (abs(row - column) < 4) for column in range(10)] for row in range(10)]
    for row in range(10):
        counts[row][row] = 88 + row
    counts[4][9], counts[9][4] = 17, 9
    sums = [sum(row) for row in counts]
    correct = sum(counts[row][row] for row in range(10))
    result = {"loss": 0.21, "top1": correct / sum(sums), "top5": 0.998, "images": sum(sums), "confusion": {}}
    result["confusion"] = {"layout": "dense", "rows": counts}
    result["per_class"] = [counts[row][row] / sums[row] for row in range(10)]
    classes = ["t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
    write_json(path, {"format": 1, "classes": classes, "last": result | {"epoch": 18}, "best": result | {"epoch": 17}})


def test_confusion(snap_compare: Compare, live_demo_runs: Path) -> None:
    write_evaluation(RunFolder(live_demo_runs / LIVE_RUN).evaluation)
    assert matches_snapshot(snap_compare, demo_app(live_demo_runs, run=LIVE_RUN), "v", wait_for_matrix)


async def wait_for_matrix(pilot: Pilot[None]) -> None:
    screen: Any = pilot.app.screen
    await wait_until(pilot, lambda: screen.evaluation_poller.value is not None)
    await wait_until_idle(pilot)
    await wait_until_idle(pilot)


def test_start_that_was_refused(snap_compare: Compare) -> None:
    with tempfile.TemporaryFile() as output:
        output.write(REFUSAL.encode())
        output.flush()
        process = SimpleNamespace(pid=1, poll=lambda: 2)
        launched = LaunchedRun(process, output, Path("runs"), None, 0.0)  # type: ignore[arg-type]
        app = demo_app(Path("runs"), demo=None)

        async def open_start(pilot: Pilot[None]) -> None:
            app.show_launch(launched)
            await pilot.pause()
            await wait_until_idle(pilot)

        assert matches_snapshot(snap_compare, app, before=open_start)
