"""The load of the host, and its header line on the monitor."""

from __future__ import annotations

from pathlib import Path

from support.screen.demo_app import FROZEN_NOW, demo_snapshot
from tui.screens.host_panel import header_line
from tui.screens.pollers.host import HostLoad, HostPoller


def test_host_poller_measures_load_of_this_host(tmp_path: Path) -> None:
    poller = HostPoller(tmp_path / "not" / "there")
    poller.poll()
    assert poller.value is not None
    assert 0 < poller.value.memory_used_bytes < poller.value.memory_total_bytes
    assert poller.value.disk_free_bytes


def test_header_line_keeps_notice_and_low_disk_space() -> None:
    load = HostLoad(41.0, 1, 2 << 30, 1 << 30)
    line = header_line(demo_snapshot(FROZEN_NOW), load, "DEMO", 1.0, 50).plain
    assert " DEMO " in line and "1 GiB free" in line and "cpu" not in line
