"""SVG snapshots of the screen of one run: live, failed, and with one chart."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.screen.demo_app import demo_app, demo_runs
from support.screen.screen_snapshots import Compare, Size, at_daily_sizes, matches_snapshot
from tui.screens.demo.server import FINISHED_RUN, LIVE_RUN

pytestmark = pytest.mark.usefixtures("frozen_environment")


@at_daily_sizes
def test_run(snap_compare: Compare, live_demo_runs: Path, size: Size) -> None:
    assert matches_snapshot(snap_compare, demo_app(live_demo_runs, run=LIVE_RUN), "m", size=size)


def test_failed_run(snap_compare: Compare) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run="cifar-4"))


def test_run_with_one_chart(snap_compare: Compare) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=FINISHED_RUN), "f x L m left left left")
