"""SVG snapshots of the screen of one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.codec import decode
from engine.gpus.snapshot import Snapshot
from support.gputrain_command import ROOT
from support.screen.demo_app import FrozenGpuFeed, demo_app, demo_runs
from support.screen.screen_snapshots import Compare, matches_snapshot

RECORDING = ROOT / "tests" / "recordings" / "eight-gpus.jsonl"

pytestmark = pytest.mark.usefixtures("frozen_environment")


def test_gpu(snap_compare: Compare, live_demo_runs: Path) -> None:
    assert matches_snapshot(snap_compare, demo_app(live_demo_runs), "enter space")


def test_gpu_with_instances(snap_compare: Compare) -> None:
    demo_runs(Path("runs"))[0].release()
    snapshot = decode(RECORDING.read_text().splitlines()[0], Snapshot)
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), FrozenGpuFeed(snapshot)), "enter left")
