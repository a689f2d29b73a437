"""The learning rate range test on two GPUs, with mixed precision, accumulation, EMA and a found batch size."""

from __future__ import annotations

import json

import pytest

from support.gpu.fake_cuda import Rehearsal, nccl_backend
from support.gpu.fake_gpu_host import UNKNOWN_PID, gpu_line, gpu_uuid

OPTIONS = ("lr-find", "digits", "--gpus", "0,1", "--from", "1e-4", "--steps", "40", "--json")


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    ("amp", "options"),
    [
        ("bf16", []),
        ("fp16", ["optim.accumulate=2", "optim.clip_norm=1", "model.ema=0.9", "optim.lr_scaling=linear"]),
        ("O2", ["data.batch_size=16", "schedule.name=plateau", "data.pipeline=stream"]),
    ],
)
def test_lr_find_on_two_gpus_leaves_nothing(rehearsal: Rehearsal, amp: str, options: list[str]) -> None:
    done = rehearsal(*OPTIONS, "--amp", amp, *options)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    started = next(line for line in lines if line["type"] == "run_started")
    assert (started["world_size"], started["backend"]) == (2, nccl_backend())
    assert started["devices"] == [gpu_uuid(0), gpu_uuid(1)]
    assert lines[-1]["type"] == "lr_found"
    assert 1e-4 < lines[-1]["valley"] < 1
    assert not rehearsal.runs.exists()
    assert [path.name for path in (rehearsal.folder / "reservations").rglob("*.json")] == []


@pytest.mark.rehearsal
def test_lr_find_refuses_gpus_in_use(rehearsal: Rehearsal) -> None:
    rehearsal.host.set_scene(gpu_line(0), gpu_line(1), f"process 0 {UNKNOWN_PID} 4096 compute")
    done = rehearsal("lr-find", "digits", "--gpus", "free:2")
    assert done.returncode == 2
    assert "device.gpus" in done.stderr
