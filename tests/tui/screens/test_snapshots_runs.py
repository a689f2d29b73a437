"""SVG snapshots of the list of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.screen.demo_app import demo_app, demo_runs
from support.screen.screen_snapshots import Compare, Size, at_daily_sizes, matches_snapshot

pytestmark = pytest.mark.usefixtures("frozen_environment")


@at_daily_sizes
def test_runs(snap_compare: Compare, size: Size) -> None:
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), "r down down", size=size)
    owners[0].release()
