"""SVG snapshots of the list of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.screen.demo_app import demo_app
from support.screen.screen_snapshots import Compare, Size, at_daily_sizes, matches_snapshot

pytestmark = pytest.mark.usefixtures("frozen_environment")


@at_daily_sizes
def test_runs(snap_compare: Compare, live_demo_runs: Path, size: Size) -> None:
    assert matches_snapshot(snap_compare, demo_app(live_demo_runs), "r down down", size=size)
