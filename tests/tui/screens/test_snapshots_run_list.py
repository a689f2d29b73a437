"""SVG snapshots of the lists of runs at work: marks and order, other programs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.folder import RunFolder
from engine.runs.labels import RunLabels
from support.runs.factories import write_labels
from support.screen.demo_app import FROZEN_NOW, demo_app, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import real_app
from support.screen.screen_snapshots import Compare, matches_snapshot
from tui.screens.demo.server import FINISHED_RUN
from tui.screens.runs import RunsScreen

pytestmark = pytest.mark.usefixtures("frozen_environment")


def test_marks_and_order(snap_compare: Compare, live_demo_runs: Path) -> None:
    labels = RunLabels(tags=("best", "paper"), note="the run of table 2")
    write_labels(RunFolder(live_demo_runs / FINISHED_RUN), labels)
    keys = "r j space space o j j j j enter"
    assert matches_snapshot(snap_compare, demo_app(live_demo_runs), keys)


def make_foreign_runs(root: Path) -> Path:
    """Copy recordings of other trainers; one of them is growing."""
    copied = root / "outputs"
    for name in ("keras", "lightning", "tensorboardx", "timm", "trackio", "trainer"):
        shutil.copytree(Path(__file__).parents[2] / "recordings" / "foreign" / name, copied / name)
    for age, path in enumerate(sorted(path for path in copied.rglob("*") if path.is_file())):
        os.utime(path, (FROZEN_NOW, FROZEN_NOW - 60 * (1 + 15 * age)))
    return copied


def test_list_of_runs_of_other_programs(snap_compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    watched, app = make_foreign_runs(tmp_path), real_app(Path("runs"))

    async def open_list(pilot: Pilot[None]) -> None:
        app.open_watched(RunsScreen(app, [watched.relative_to(tmp_path)]))
        await wait_until(pilot, lambda: "6 runs" in visible_text(pilot))
        await wait_until_idle(pilot)

    assert matches_snapshot(snap_compare, app, "", open_list, (80, 24))
