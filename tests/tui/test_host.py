"""The load of the host, and its header line on the monitor."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from engine.runs.records import RankDevice
from support.screen.demo_app import FROZEN_NOW, demo_snapshot
from tui.pollers.host import HostLoad, HostPoller
from tui.screens.host_panel import header_line


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


def test_header_line_keeps_notice_and_low_disk_space() -> None:
    load = HostLoad(41.0, 1, 2 << 30, 1 << 30)
    line = header_line(demo_snapshot(FROZEN_NOW), load, "DEMO", 1.0, 50).plain
    assert " DEMO " in line and "1 GiB free" in line and "cpu" not in line
