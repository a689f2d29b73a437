"""SVG snapshots of the monitor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.screen.demo_app import demo_app, demo_runs, no_gpu_feed
from support.screen.screen_snapshots import Compare, Size, at_sizes, matches_snapshot

SIZES = [(60, 20), (80, 24), (120, 34), (160, 48), (200, 60)]

pytestmark = pytest.mark.usefixtures("frozen_environment")


@at_sizes(*SIZES)
def test_monitor(snap_compare: Compare, size: Size) -> None:
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), size, "down down space down space")
    owners[0].release()


@at_sizes((120, 34))
def test_light_monitor(snap_compare: Compare, size: Size) -> None:
    owners = demo_runs(Path("runs"))
    theme = Path(os.environ["XDG_STATE_HOME"]) / "gputrain" / "theme.json"
    theme.parent.mkdir(parents=True)
    theme.write_text(json.dumps({"theme": "gputrain-light"}))
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), size, "tab")
    owners[0].release()


@at_sizes((80, 24), (160, 48))
def test_monitor_without_gpu(snap_compare: Compare, size: Size) -> None:
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), no_gpu_feed(), demo=None), size)
    owners[0].release()
