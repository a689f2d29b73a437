"""Throughput of PCIe and NVLink on the fake driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from engine.base.codec import decode
from engine.gpus import nvml, sampler
from engine.gpus.sampler import GpuThread, SamplerState
from engine.gpus.snapshot import Gpu, SamplerOptions, Snapshot
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line

RECORDING = Path(__file__).parents[2] / "recordings" / "eight-gpus.jsonl"
THROUGHPUT = ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")


@pytest.fixture
def driver(loaded_gpu_host: FakeGpuHost) -> Iterator[FakeGpuHost]:
    """The fake driver, initialized in this process."""
    loaded_gpu_host.set_scene(gpu_line(0))
    nvml.initialize()
    yield loaded_gpu_host
    pynvml.nvmlShutdown()


def poll(options: SamplerOptions) -> Gpu:
    return GpuThread(0, SamplerState(options))._poll()


def test_links_are_read_from_gpm(driver: FakeGpuHost) -> None:
    driver.set_scene(gpu_line(0, replays=7))
    gpu = poll(SamplerOptions())
    assert [gpu.value(name) for name in THROUGHPUT] == [1000, 2000, 3000, 4000]
    assert [gpu.value(name) for name in ("nvlinks", "pcie_replays", "memory_temperature")] == [18, 7, 45]


@pytest.mark.usefixtures("driver")
def test_links_are_not_requested_without_activity() -> None:
    gpu = poll(SamplerOptions(activity=False))
    assert {gpu[name].reason for name in THROUGHPUT} == {"not requested"}


def test_pcie_without_gpm_is_measured_when_due(driver: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.set_scene(gpu_line(0, gpm=0))
    assert {poll(SamplerOptions())[name].reason for name in THROUGHPUT} == {"not supported"}
    monkeypatch.setattr(sampler, "PCIE_INTERVAL_SECONDS", 0.0)
    gpu = poll(SamplerOptions())
    assert (gpu.value("pcie_sent"), gpu.value("pcie_received")) == (1000, 2000)


def test_snapshot_of_earlier_recording_has_unknown_links() -> None:
    snapshot = json.loads(RECORDING.read_text().splitlines()[0])
    for gpu in snapshot["gpus"]:
        for name in (*THROUGHPUT, "nvlinks", "max_pcie_width"):
            del gpu[name]
    gpu = decode(json.dumps(snapshot), Snapshot).gpus[0]
    assert {gpu[name].reason for name in THROUGHPUT} == {"not in this recording"}
    assert gpu.value("util") is not None
