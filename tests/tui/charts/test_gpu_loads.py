"""The past of all GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.codec import decode
from engine.gpus.snapshot import Snapshot
from support.replace import replace
from tui.charts.history import LOAD_READINGS, GpuLoads

RECORDING = Path(__file__).parents[2] / "recordings" / "eight-gpus.jsonl"


@pytest.fixture
def snapshot() -> Snapshot:
    return decode(RECORDING.read_text().splitlines()[0], Snapshot)


def test_loads_record_shares_of_memory_and_power(snapshot: Snapshot) -> None:
    loads, gpu = GpuLoads(), snapshot.gpus[2]
    loads.record(snapshot)
    latest = {key: loads.columns(gpu.uuid, key, 1.0, 1, snapshot.time)[0] for key in LOAD_READINGS}
    assert latest["util"] == 100
    assert latest["memory_used"] == pytest.approx(100 * gpu.value("memory_used") / gpu.value("memory_total"))
    assert latest["power"] == pytest.approx(100 * 699.2 / 700)
    assert latest["temperature"] == 71


def test_loads_leave_gap_while_gpu_does_not_answer(snapshot: Snapshot) -> None:
    loads, uuid = GpuLoads(), snapshot.gpus[0].uuid
    loads.record(snapshot)
    silent = replace(snapshot, time=snapshot.time + 1, gpus=(snapshot.gpus[0].as_stale(1.0),))
    loads.record(silent)
    util = snapshot.gpus[0].value("util")
    assert loads.columns(uuid, "util", 2.0, 2, silent.time) == [util, None]


def test_loads_keep_last_answer_of_silent_gpu(snapshot: Snapshot) -> None:
    loads, gpu = GpuLoads(), snapshot.gpus[0]
    assert loads.last_answer(gpu.as_stale(3.0)) is None
    loads.record(snapshot)
    assert loads.last_answer(gpu.as_stale(3.0)) is gpu
    assert loads.last_answer(gpu) is gpu
