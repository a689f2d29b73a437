"""The checks of a run that the doctor makes: its devices and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.distributed.node_plan import plan_node
from engine.doctor.check import Check
from engine.doctor.examine import device_check, preflight_checks
from engine.gpus.allocation import GpuAllocation
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.selection import CudaDevice, select
from engine.launch.preflight import run_preflight
from engine.launch.request import RunRequest
from engine.utils.errors import Problem
from support.gpu.fake_gpu_host import gpu_uuid

TWO = [
    CudaDevice(0, gpu_uuid(0), "Fake H100", 0),
    CudaDevice(1, gpu_uuid(1), "Fake H100", 0, unavailable=Unavailable(Obstacle.IN_USE, "process 7 of alice is on it")),
]


def config(*overrides: str) -> Config:
    return resolve_config(None, list(overrides)).config


def run_checks(tmp_path: Path, devices: Sequence[CudaDevice], *overrides: str) -> dict[str, Check]:
    """Preflight checks by name, on a host with these GPUs."""
    request, allocation = RunRequest(config(*overrides), tmp_path / "runs", "digits"), GpuAllocation()

    def choose_gpus(wait: bool) -> list[CudaDevice]:
        allocation.devices = select(request.config.device.gpus, devices)
        return allocation.devices

    preflight = run_preflight(request, choose_gpus)
    return {check.name: check for check in preflight_checks(request.config, preflight, allocation)}


def test_preflight_checks_report_devices_and_data(tmp_path: Path) -> None:
    checks = run_checks(tmp_path, TWO, "device.gpus=auto")
    assert {check.state for check in checks.values()} == {"ok"}
    for name, values in (("devices", ("auto ", "GPU 0")), ("data", ("digits: ", "1438 ", "359 "))):
        assert all(value in checks[name].found for value in values)
    shared = GpuAllocation(TWO, [Problem("", "sharing what is in use", code="gpu-in-use")])
    assert device_check(config("device.gpus=all"), plan_node(config(), TWO), shared).code == "gpu-in-use"
