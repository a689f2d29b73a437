"""SVG snapshots of the screen of one run: live, finished and failed, with two and with four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.screen.demo_app import demo_app, demo_runs, four_rank_run
from support.screen.screen_snapshots import Compare, Size, at_sizes, matches_snapshot
from tui.demo.server import FINISHED_RUN, LIVE_RUN
from tui.palette import LIGHT
from tui.theme import save_palette

pytestmark = pytest.mark.usefixtures("frozen_environment")


@at_sizes((60, 20), (80, 24), (120, 34), (160, 48), (200, 60))
def test_run(snap_compare: Compare, size: Size) -> None:
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=LIVE_RUN), size, "m")
    owners[0].release()


@at_sizes((120, 34))
def test_run_light(snap_compare: Compare, size: Size) -> None:
    save_palette(LIGHT)
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=LIVE_RUN), size)
    owners[0].release()


@at_sizes((160, 48))
def test_run_of_four_ranks(snap_compare: Compare, size: Size) -> None:
    owner = four_rank_run(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run="wide-4"), size)
    owner.release()


@at_sizes((80, 24), (160, 48))
def test_finished_run(snap_compare: Compare, size: Size) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=FINISHED_RUN), size)


@at_sizes((80, 24), (160, 48))
def test_failed_run(snap_compare: Compare, size: Size) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run="cifar-4"), size)


@at_sizes((80, 24), (120, 34))
def test_run_with_one_chart(snap_compare: Compare, size: Size) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=FINISHED_RUN), size, "f x L m left left left")
