"""DDP over NCCL on two fake GPUs: the same training as two ranks on CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_cuda import Rehearsal, run_started
from fake_gpu_host import gpu_uuid
from gputrain_command import read_events

DIGITS = ("digits", "--epochs", "2", "run.log_every=5")


def losses(run: Path) -> list[float]:
    return [loss for event in read_events(run) if event["type"] == "step" for loss in event["losses"]]


def validation_accuracies(run: Path) -> list[float]:
    return [event["val_accuracy"] for event in read_events(run) if event["type"] == "epoch"]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_ddp_over_nccl_equals_cpu_ranks(rehearsal: Rehearsal, start_method: str) -> None:
    on_gpus = rehearsal.run("gpus", *DIGITS, "--gpus", "free:2", f"device.start_method={start_method}")
    on_cpu = rehearsal.run("cpu", *DIGITS, "--ranks", "2", "--gpus", "cpu")
    started = run_started(on_gpus)
    assert (started["backend"], started["devices"]) == ("nccl", [gpu_uuid(0), gpu_uuid(1)])
    assert started["start_method"] == start_method
    assert losses(on_gpus) == pytest.approx(losses(on_cpu), rel=1e-4)
    assert validation_accuracies(on_gpus) == validation_accuracies(on_cpu)


def test_only_rank_0_has_context_on_gpu_0(rehearsal: Rehearsal) -> None:
    rehearsal.run("contexts", *DIGITS, "--gpus", "free:2")
    contexts = [
        [line.partition(" by ")[0] for line in lines if line.startswith("context")]
        for lines in rehearsal.cuda_log().values()
    ]
    assert sorted(contexts) == [["context on device 0"], ["context on device 1"]]
