"""The checks of a run that the doctor makes: its devices and data, and the all-reduce of its ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.distributed.node_plan import plan_node
from engine.distributed.rank_env import RankInfo
from engine.doctor import probe, software
from engine.doctor.check import Check
from engine.doctor.run import all_reduce_check, all_reduce_devices, device_check, preflight_checks
from engine.gpus.allocation import GpuAllocation
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.selection import CudaDevice, select
from engine.launch.preflight import run_preflight
from engine.launch.request import RunRequest
from engine.utils.errors import Problem
from support.gpu.fake_gpu_host import gpu_uuid
from support.replace import replace

OUTCOME = software.AllReduceResult(right=True, seconds=0.001, size_bytes=64 << 20)
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


@pytest.mark.nightly
def test_preflight_checks_repeat_sentence_of_run(tmp_path: Path) -> None:
    check = run_checks(tmp_path, TWO, "device.gpus=free:2")["devices"]
    assert (check.state, check.code) == ("problem", "gpu-in-use")
    assert check.found.startswith("device.gpus: 2 ") and "GPU 1: process 7 of alice is on it" in check.found
    check = run_checks(tmp_path, [], "device.gpus=cpu", "device.backend=nccl")["devices"]
    assert check.found.startswith("device.backend: nccl ") and "gloo" in check.advice
    check = run_checks(tmp_path, [], "data.batch_size=5000")["data"]
    assert check.found.startswith("data.batch_size: ") and " 5000" in check.found
    check = run_checks(tmp_path, [], "model.name=cnnn")["config"]
    assert check.code == "unknown-value" and check.found.startswith("model.name: ") and "'cnnn'" in check.found


def test_preflight_checks_keep_advice_apart_from_path_with_semicolon(tmp_path: Path) -> None:
    missing = tmp_path / "a; b"
    folder = run_checks(tmp_path, [], "data.dataset=folder", f"data.path={missing}")["data"]
    assert folder.code == "not-found" and folder.found.startswith(f"data.path: {missing} ")
    mnist = run_checks(tmp_path, [], "data.dataset=mnist", f"data.path={missing}")["data"]
    assert mnist.code == "not-found" and mnist.found.startswith("data.path: ") and f" {missing}: " in mnist.found
    assert "MNIST/raw" in mnist.advice and "data.download=true" in mnist.advice


def test_all_reduce_devices_are_chosen_gpus_or_at_least_two_cpu_ranks() -> None:
    assert all_reduce_devices(config(), TWO) == [gpu_uuid(0), gpu_uuid(1)]
    assert all_reduce_devices(config(), []) == ["cpu", "cpu"]
    assert all_reduce_devices(config("device.ranks=3"), []) == ["cpu"] * 3


def test_all_reduce_check_rates_speed_correctness_and_errors() -> None:
    gpus = [gpu_uuid(0), gpu_uuid(1)]
    fast = all_reduce_check(gpus, OUTCOME)
    assert fast.state == "ok" and all(value in fast.found for value in ("64 MiB", "2 GPUs", "NCCL", "67.1 GB/s"))
    slow, wrong = (
        all_reduce_check(gpus, replace(OUTCOME, **change)) for change in ({"seconds": 1.0}, {"right": False})
    )
    assert [slow.state, slow.code, wrong.state, wrong.code] == ["warning", "slow-network", "problem", "wrong-result"]
    assert all_reduce_check(["cpu", "cpu"], replace(OUTCOME, seconds=1.0)).state == "ok"
    failed = all_reduce_check(gpus, software.AllReduceResult(error="no answer within 60 s"))
    assert (failed.state, failed.code, "NCCL_P2P_DISABLE=1" in failed.advice) == ("problem", "library-failed", True)
    assert "GB/s" not in all_reduce_check(gpus[:1], OUTCOME).found


def test_all_reduce_names_rank_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_or_die(store: object, rank_info: RankInfo, **_: object) -> software.AllReduceResult:
        if rank_info.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return OUTCOME

    monkeypatch.setattr(probe, "_time_all_reduce", run_or_die)
    monkeypatch.setattr(probe, "open_local_store", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    error = probe.all_reduce(["cpu", "cpu"]).error
    assert error is not None and error.startswith("rank 1 (cpu) failed: it was killed by SIGKILL")
