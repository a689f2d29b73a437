"""The load of the host, and its header line on the monitor."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from engine.runs.records import RankDevice
from support.screen.demo_app import FROZEN_NOW, demo_snapshot
from tui.pollers.host import HostLoad, HostPoller
from tui.screens.host_panel import header_line, host_graphs

LOAD = HostLoad(41.0, 212 << 30, 503 << 30, 1_300 << 30, 2e6, 48e6)


def test_host_poller_measures_load_of_this_host(tmp_path: Path) -> None:
    poller = HostPoller(tmp_path / "not" / "there")
    poller.poll()
    assert poller.value is not None
    assert 0 < poller.value.memory_used_bytes < poller.value.memory_total_bytes
    assert poller.value.disk_free_bytes
    assert poller.value.sent_per_s is None
    assert any(value is not None for value in poller.memory.columns(60.0, 60, time.time()))


def test_host_poller_reads_ranks_on_cpu(tmp_path: Path) -> None:
    ended = 2**22 + 1
    host = socket.gethostname()
    ranks = [("run-1", RankDevice(rank, host, pid, "cpu")) for rank, pid in enumerate((os.getpid(), ended))]
    poller = HostPoller(tmp_path, find_ranks=lambda: ranks)
    poller.poll()
    (process,) = poller.ranks
    assert (process.pid, process.run, process.rank) == (os.getpid(), "run-1", 0)
    assert process.memory.value
    # CPU utilization needs two polls.
    assert process.cpu.value is None
    poller.poll()
    assert poller.ranks[0].cpu.value is not None


def test_header_line_omits_details_when_narrow() -> None:
    lines = {width: header_line(demo_snapshot(FROZEN_NOW), LOAD, None, 1.0, width).plain for width in (30, 70, 190)}
    assert all(len(line) <= width for width, line in lines.items())
    for part in (
        "demo-server",
        "H100 80GB HBM3 x 8",
        "driver 580.95",
        "41%",
        "212.0/503.0 GiB",
        "1.3 TiB free",
        "1 Hz",
    ):
        assert part in lines[190]
    assert "↓48 MB/s ↑2 MB/s" in lines[190]
    assert "cpu 41%" in lines[70] and "driver" not in lines[70]
    assert lines[30].startswith("demo-server")


def test_header_line_keeps_notice_and_low_disk_space() -> None:
    load = HostLoad(41.0, 1, 2 << 30, 1 << 30)
    line = header_line(demo_snapshot(FROZEN_NOW), load, "DEMO", 1.0, 50).plain
    assert " DEMO " in line and "1 GiB free" in line and "cpu" not in line


def test_host_graphs_fill_their_room(tmp_path: Path) -> None:
    poller = HostPoller(tmp_path)
    poller.record(LOAD, FROZEN_NOW)
    for width, height in ((78, 2), (78, 6), (40, 20)):
        lines = host_graphs(LOAD, (poller.cpu, poller.memory), width, height, 60.0)
        assert len(lines) == height
        assert all(line.cell_len <= width for line in lines)
    assert host_graphs(None, (poller.cpu, poller.memory), 78, 6, 60.0) == []
