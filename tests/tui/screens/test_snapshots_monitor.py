"""SVG snapshots of the monitor."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.screen.demo_app import demo_app, no_gpu_feed
from support.screen.holders import holder_feed
from support.screen.hosts import FrozenHosts, make_readings
from support.screen.screen_snapshots import Compare, Size, at_daily_sizes, matches_snapshot
from tui.terminal.palette import ANSI, LIGHT, Palette
from tui.terminal.theme import save_palette

pytestmark = pytest.mark.usefixtures("frozen_environment")


@at_daily_sizes
def test_monitor(snap_compare: Compare, live_demo_runs: Path, size: Size) -> None:
    assert matches_snapshot(snap_compare, demo_app(live_demo_runs), "down down space down space", size=size)


def test_monitor_with_idle_holders(snap_compare: Compare, live_demo_runs: Path) -> None:
    app = demo_app(live_demo_runs, holder_feed(), demo=None)
    assert matches_snapshot(snap_compare, app, "tab")


@pytest.mark.parametrize("palette", [LIGHT, ANSI], ids=lambda palette: palette.name)
def test_monitor_in_theme(snap_compare: Compare, live_demo_runs: Path, palette: Palette) -> None:
    save_palette(palette)
    assert matches_snapshot(snap_compare, demo_app(live_demo_runs), "tab")


def test_monitor_without_gpu(snap_compare: Compare, live_demo_runs: Path) -> None:
    assert matches_snapshot(snap_compare, demo_app(live_demo_runs, no_gpu_feed(), demo=None))


@at_daily_sizes
def test_monitor_with_hosts(
    snap_compare: Compare, live_demo_runs: Path, size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "workstation")
    app = demo_app(live_demo_runs, demo=None)
    app.host_watch = FrozenHosts(make_readings())
    assert matches_snapshot(snap_compare, app, size=size)
