"""SVG snapshots of the list of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.screen.demo_app import demo_app, demo_runs
from support.screen.screen_snapshots import Compare, Size, at_sizes, matches_snapshot

SIZES = [(60, 20), (80, 24), (120, 34), (160, 48), (200, 60)]

pytestmark = pytest.mark.usefixtures("frozen_environment")


@at_sizes(*SIZES)
def test_runs(snap_compare: Compare, size: Size) -> None:
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), size, "r down down")
    owners[0].release()


def test_runs_without_match(snap_compare: Compare) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), (80, 24), "r slash x y")
