"""SVG snapshots of the screen of one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.gpus.snapshot import Snapshot
from support.gputrain_command import ROOT
from support.screen.demo_app import FrozenGpuFeed, demo_app, demo_runs
from support.screen.screen_snapshots import Compare, Size, at_sizes, matches_snapshot

SIZES = [(60, 20), (80, 24), (160, 48)]
RECORDING = ROOT / "tests" / "recordings" / "eight-gpus.jsonl"

pytestmark = [pytest.mark.usefixtures("frozen_environment"), at_sizes(*SIZES)]


def test_gpu(snap_compare: Compare, size: Size) -> None:
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), size, "enter space")
    owners[0].release()


def test_stale_gpu(snap_compare: Compare, size: Size) -> None:
    """A GPU that does not answer keeps its last readings and their graphs."""
    demo_runs(Path("runs"))[0].release()
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), size, "enter left minus")


def test_gpu_with_instances(snap_compare: Compare, size: Size) -> None:
    demo_runs(Path("runs"))[0].release()
    snapshot = Snapshot.from_line(RECORDING.read_text().splitlines()[0])
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), FrozenGpuFeed(snapshot)), size, "enter left")
