"""The precision that auto chooses on GPUs, and what a resumed run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from support.gpu.fake_cuda import Rehearsal, run_started
from support.gpu.fake_gpu_host import gpu_line
from support.gputrain_command import read_events
from support.messages import says

DIGITS = ("digits", "--model", "cnn", "--amp", "auto")
EXCHANGE = ("device.compress=bf16", "device.bucket_cap_mb=1")


def uses_tf32(run: Path) -> bool:
    """Whether the steps before the last checkpoint of a run computed in TF32."""
    return bool(torch.load(run / "checkpoints" / "last.pt", map_location="cpu", weights_only=True)["tf32"])


@pytest.mark.rehearsal
def test_run_on_gpus_computes_in_bf16_and_keeps_it(rehearsal: Rehearsal) -> None:
    run = rehearsal.run("gpus", *DIGITS, "--gpus", "free:2", *EXCHANGE, "--epochs", "1")
    assert run_started(run)["precision"] == "bf16 AMP (auto), TF32, channels_last"
    assert uses_tf32(run)
    assert yaml.safe_load((run / "config.yaml").read_text())["precision"] == {"amp": "bf16", "tf32": "auto"}

    rehearsal.host.set_scene(gpu_line(0, capability=75), gpu_line(1, capability=75))
    again = ("run", "--headless", *DIGITS, "--name", "gpus", "--resume", *EXCHANGE, "--epochs", "2")
    older = rehearsal(*again, "--gpus", "free:2", FAKE_CUDA_CAPABILITY="7")
    assert older.returncode == 2
    assert says(older.stderr, "not-supported", "error: precision.amp: ", "bfloat16")
    resumed = rehearsal(*again, "--gpus", "cpu")
    assert resumed.returncode == 0, resumed.stderr
    assert says(resumed.stderr, "resume-differs", "float32", "TF32")
    [started] = [event for event in read_events(run) if event["type"] == "run_resumed"]
    assert started["precision"] == "bf16 AMP, channels_last"
    assert not uses_tf32(run)


@pytest.mark.rehearsal
def test_dry_run_says_why_older_gpu_computes_in_float32(rehearsal: Rehearsal) -> None:
    rehearsal.host.set_scene(gpu_line(0, capability=75))
    done = rehearsal("run", "--dry-run", *DIGITS, "--gpus", "free:1", FAKE_CUDA_CAPABILITY="7")
    assert done.returncode == 0, done.stderr
    assert "precision          float32 (auto: compute capability 7.5 has no bf16)\n" in done.stdout
