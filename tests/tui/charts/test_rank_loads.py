"""The past load of the ranks of a run."""

from __future__ import annotations

import os
import socket

import pytest

from engine.runs.records import RankDevice
from support.replace import replace
from support.runs.event_factories import make_run_started
from tui.charts.rank_loads import RankLoads, cpu_load_key


@pytest.mark.parametrize("pid", [-1, 2**40])
def test_rank_loads_skip_rank_whose_pid_is_impossible(pid: int) -> None:
    started = make_run_started()
    ranks = [RankDevice(rank, socket.gethostname(), number, "cpu") for rank, number in enumerate((pid, os.getpid()))]
    loads = RankLoads()
    for time in (1.0, 2.0):
        loads.measure_cpu(replace(started, ranks=ranks), time)
    assert list(loads.histories) == [cpu_load_key(1)]
