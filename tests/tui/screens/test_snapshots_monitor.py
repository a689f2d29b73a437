"""SVG snapshots of the monitor."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.screen.demo_app import demo_app, demo_runs, no_gpu_feed
from support.screen.holders import holder_feed
from support.screen.hosts import FrozenHosts, make_readings
from support.screen.screen_snapshots import Compare, Size, at_daily_sizes, matches_snapshot
from tui.terminal.palette import ANSI, LIGHT, Palette
from tui.terminal.theme import save_palette

pytestmark = pytest.mark.usefixtures("frozen_environment")


@at_daily_sizes
def test_monitor(snap_compare: Compare, size: Size) -> None:
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), "down down space down space", size=size)
    owners[0].release()


def test_monitor_with_idle_holders(snap_compare: Compare) -> None:
    owners = demo_runs(Path("runs"))
    app = demo_app(Path("runs"), holder_feed(), demo=None)
    assert matches_snapshot(snap_compare, app, "tab")
    owners[0].release()


@pytest.mark.parametrize("palette", [LIGHT, ANSI], ids=lambda palette: palette.name)
def test_monitor_in_theme(snap_compare: Compare, palette: Palette) -> None:
    owners = demo_runs(Path("runs"))
    save_palette(palette)
    assert matches_snapshot(snap_compare, demo_app(Path("runs")), "tab")
    owners[0].release()


def test_monitor_without_gpu(snap_compare: Compare) -> None:
    owners = demo_runs(Path("runs"))
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), no_gpu_feed(), demo=None))
    owners[0].release()


@at_daily_sizes
def test_monitor_with_hosts(snap_compare: Compare, size: Size, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "workstation")
    owners = demo_runs(Path("runs"))
    app = demo_app(Path("runs"), demo=None)
    app.host_watch = FrozenHosts(make_readings())
    assert matches_snapshot(snap_compare, app, size=size)
    owners[0].release()
