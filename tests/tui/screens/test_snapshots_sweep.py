"""SVG snapshot of the screen of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs.sweeps import make_finished_trials
from support.screen.screen_driver import real_app
from support.screen.screen_snapshots import Compare, matches_snapshot

pytestmark = pytest.mark.usefixtures("frozen_environment")


def test_sweep(snap_compare: Compare) -> None:
    make_finished_trials(Path("runs"))
    assert matches_snapshot(snap_compare, real_app(Path("runs")), "r S")
