"""SVG snapshots of every screen at three terminal sizes.

`pytest tests/tui/screens/test_snapshots.py --snapshot-update` replaces the stored snapshots; review the report first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from demo_app import demo_app, demo_runs
from screen_snapshots import Compare, matches_snapshot, size_name
from tui.demo.server import LIVE_RUN

SIZES = [(80, 24), (120, 34), (200, 60)]

pytestmark = [pytest.mark.usefixtures("frozen_environment"), pytest.mark.parametrize("size", SIZES, ids=size_name)]


def test_help(snap_compare: Compare, size: tuple[int, int]) -> None:
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=LIVE_RUN), size, "question_mark")
