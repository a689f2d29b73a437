"""Whole runs on real GPUs: equality with the CPU, NCCL failures, compiled models, resume, and automatic batch size."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from support.gpu.fake_cuda import run_started
from support.gputrain_command import Gputrain, effective_events, last_checkpoint_weights, read_events, read_failures

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA GPU")]
needs_two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs")
# Float32 without TF32, because the CPU has none.
EXACT = ("digits", "run.log_every=5", "precision.tf32=off")
# A user model on the working folder's path: dropout, and from a given step on a fault on the GPU.
USER_MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, size, channels, classes, fault=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 64), nn.ReLU(), nn.Dropout(0.3))
        self.head, self.table = nn.Linear(64, classes), nn.Embedding(4, 64)
        self.fault, self.step, self.kept = fault, 0, []

    def forward(self, images):
        self.step += self.training
        fault = self.fault if self.step >= 30 else None
        if fault == "hang":
            torch.cuda._sleep(10**12)  # eight minutes at 2 GHz
        while fault == "memory":
            self.kept.append(torch.empty(2**28, dtype=torch.uint8, device=images.device))
        index = torch.full((len(images),), 9 if fault == "assert" else 0, device=images.device)
        return self.head(self.layers(images) + self.table(index))
"""


@pytest.fixture
def on_gpus(gputrain: Gputrain) -> Gputrain:
    """The command with all GPUs of this host, and the user model in its folder."""
    gputrain.environment.pop("CUDA_VISIBLE_DEVICES")
    (gputrain.folder / "user_model.py").write_text(USER_MODEL)
    return gputrain


def train(gputrain: Gputrain, name: str, *arguments: str) -> Path:
    """Train a run to its end and return its folder."""
    done = gputrain("run", "--headless", *arguments, "--name", name)
    assert done.returncode == 0, done.stderr
    return gputrain.runs / name


def losses(run: Path) -> list[float]:
    return [loss for event in read_events(run) if event["type"] == "step" for loss in event["losses"]]


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


@pytest.mark.parametrize("gpus", [count for count in (1, 2, 4, 8) if count <= max(GPUS, 1)])
def test_ddp_losses_equal_cpu_ranks(gpus: int, on_gpus: Gputrain) -> None:
    # With a small learning rate, rounding errors of the first steps do not grow into other losses.
    short = (*EXACT, "run.epochs=1", "optim.lr=0.01")
    gpu_run = train(on_gpus, "gpus", *short, "--gpus", f"free:{gpus}")
    cpu_run = train(on_gpus, "cpu", *short, "--gpus", "cpu", "--ranks", str(gpus))
    assert losses(gpu_run) == pytest.approx(losses(cpu_run), rel=1e-3, abs=1e-4)
    assert summary(gpu_run)["val_accuracy"] == pytest.approx(summary(cpu_run)["val_accuracy"], abs=0.01)


@needs_two_gpus
@pytest.mark.card
def test_hung_rank_is_named_under_nccl(on_gpus: Gputrain) -> None:
    on_gpus.inject_fault("hang", 1, 12)
    done = on_gpus(
        "run", "--headless", *EXACT, "--gpus", "free:2", "--name", "hung", "run.watchdog=15", "device.timeout=15"
    )
    assert done.returncode == 1
    assert read_failures(on_gpus.runs / "hung") == [(1, "rank-hung")]
    assert "rank 1 (GPU-" in done.stderr.splitlines()[-1]
    assert " 15 s (run.watchdog)" in done.stderr.splitlines()[-1]


@pytest.mark.card
@pytest.mark.parametrize(
    ("fault", "cause"),
    [("assert", "device-side assert"), ("hang", " 15 s (run.watchdog)"), ("memory", "out of memory")],
)
def test_fault_on_the_gpu_is_named_as_cause(fault: str, cause: str, on_gpus: Gputrain) -> None:
    arguments = ("model.name=user_model:Model", f"model.options={{fault: {fault}}}", "run.watchdog=15")
    done = on_gpus("run", "--headless", *EXACT, *arguments, "--gpus", f"free:{min(GPUS, 2)}", "--name", "a")
    assert done.returncode == 1
    assert cause in done.stderr.splitlines()[-1]


@pytest.mark.card
def test_cuda_graphs_replay_each_image_size(on_gpus: Gputrain) -> None:
    model = ("model.name=resnet18-small", "model.options={width: 16}", "data.size_schedule=[8@1,12@3]")
    compiled = ("model.compile=true", "model.compile_mode=reduce-overhead")
    run = train(on_gpus, "graphs", "digits", "--epochs", "5", *model, *compiled, "--gpus", f"free:{min(GPUS, 2)}")
    assert summary(run)["val_accuracy"] > 0.9


@pytest.mark.card
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_ddp_with_ema_learns(mode: str, on_gpus: Gputrain) -> None:
    options = ("model.compile=true", f"model.compile_mode={mode}", "model.ema=0.9", "--gpus", f"free:{min(GPUS, 2)}")
    run = train(on_gpus, "compiled", "digits", "--epochs", "5", *options)
    assert summary(run)["val_accuracy"] > 0.9


@pytest.mark.parametrize("gpus", [count for count in (1, 2) if count <= max(GPUS, 1)])
@pytest.mark.parametrize(("fault", "code"), [("stop the run", 3), ("kill the run", -signal.SIGKILL)])
def test_resume_with_dropout_continues_same_training(fault: str, code: int, gpus: int, on_gpus: Gputrain) -> None:
    options = (*EXACT, "run.epochs=2", "model.name=user_model:Model", "device.deterministic=true")
    options = (*options, "checkpoint.every_steps=5", "--gpus", f"free:{gpus}")
    whole = train(on_gpus, "whole", *options)
    on_gpus.inject_fault(fault, 0, 12, once=True)
    stopped = on_gpus("run", "--headless", *options, "--name", "stopped")
    assert stopped.returncode == code, stopped.stderr
    assert on_gpus("resume", "stopped", "--headless").returncode == 0
    assert effective_events(on_gpus.runs / "stopped") == effective_events(whole)
    weights, resumed_weights = last_checkpoint_weights(whole), last_checkpoint_weights(on_gpus.runs / "stopped")
    assert all(torch.equal(weights[key].cpu(), resumed_weights[key].cpu()) for key in weights)


@pytest.mark.parametrize("amp", ["off", "fp16", "bf16"])
def test_run_trains_on_a_gpu_of_nvml_and_is_evaluated_there(amp: str, on_gpus: Gputrain) -> None:
    run = train(on_gpus, "one", "digits", "--gpus", "free:1", "--amp", amp)
    started, accuracy = run_started(run), summary(run)["best_val_accuracy"]
    assert (started["backend"], started["ranks"][0]["device"]) == ("gloo", started["devices"][0])
    listed = json.loads(on_gpus("gpus", "--json").stdout)["gpus"]
    assert len(listed) == GPUS and started["devices"][0] in {gpu["uuid"] for gpu in listed}
    evaluated = json.loads(on_gpus("evaluate", "one", "--gpus", "free:1", "--json").stdout)["top1"]
    assert accuracy > 0.97 and evaluated == pytest.approx(accuracy, abs=0.005)


def test_deterministic_training_is_bit_identical_twice(on_gpus: Gputrain) -> None:
    options = (*EXACT, "run.epochs=2", "device.deterministic=true", "--amp", "bf16", "--gpus", f"free:{min(GPUS, 2)}")
    assert losses(train(on_gpus, "first", *options)) == losses(train(on_gpus, "second", *options))


@pytest.mark.card
def test_auto_batch_size_trains_within_memory(on_gpus: Gputrain) -> None:
    data = ("data.dataset=fake", "data.fake_train=40000", "data.fake_val=64", "data.image_size=128", "data.channels=3")
    options = ("model.name=resnet18", "--batch-size", "auto", "--epochs", "1", "--amp", "bf16", "--gpus", "free:1")
    run = train(on_gpus, "auto", *data, *options)
    assert run_started(run)["batch_size"] > 64
