"""Measure training steps on the first GPU against a bare PyTorch loop.

Usage: `measure_steps.py STEPS WINDOWS BATCH KEY=VALUE ...`. Prints one JSON object: milliseconds and kernel launches
per step of both, and the median of the ratios of adjacent windows. Windows of both alternate, and the host waits for
the GPU at the end of a window only. The bare loop has the same model, precision and memory format. With
`model.compile`, gputrain's steps are measured alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from engine.data.batch import DeviceBatch
from engine.training.loop import train_step
from support.runs.in_process import PremadeBatches, single_rank_trainer

BATCHES, PROFILED_STEPS = 4, 5
IMAGE_SIZE, CLASSES = 28, 10
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
RECIPE = (
    *("data.dataset=fake", f"data.image_size={IMAGE_SIZE}", "data.channels=1"),
    *("model.name=resnet18-small", "optim.lr=0.01", "schedule.name=constant", "schedule.warmup_epochs=0"),
)


def window_ms(step: Callable[[], object], steps: int) -> float:
    """Return the milliseconds per step of a window."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def launches_per_step(step: Callable[[], object]) -> dict[str, float | None]:
    """Return the calls of the runtime and the driver that launch kernels and graphs; None without CUPTI."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    calls = Counter(event.name for event in profiled.events() or ())
    kernels = sum(calls[name] for name in LAUNCHES) / PROFILED_STEPS
    graphs = calls["cudaGraphLaunch"] / PROFILED_STEPS
    return {"kernels": kernels or None, "graphs": graphs} if kernels or graphs else {"kernels": None, "graphs": None}


def bare_step(model: nn.Module, optimizer: torch.optim.Optimizer, amp: bool, images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=amp):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


def measure(steps: int, windows: int, batch: int, overrides: list[str]) -> dict[str, object]:
    images = batch * ((windows + 1) * steps + PROFILED_STEPS)
    sizes = [f"data.batch_size={batch}", f"data.fake_train={images}", f"data.fake_val={batch}"]
    keys = [*RECIPE, *sizes, *overrides]
    with single_rank_trainer(*keys, on_gpu=True) as trainer:
        premade = [
            (
                torch.randn(batch, 1, IMAGE_SIZE, IMAGE_SIZE, device=trainer.device).contiguous(
                    memory_format=trainer.model.memory_format
                ),
                torch.randint(CLASSES, (batch,), device=trainer.device),
            )
            for _ in range(BATCHES)
        ]
        trainer.data.batches = PremadeBatches([DeviceBatch(images, labels, 1.0) for images, labels in premade])

        def trainer_step() -> None:
            trainer.control.handle_requests()
            train_step(trainer)

        measured: dict[str, Callable[[], object]] = {"ours": trainer_step}
        if "model.compile=true" not in overrides:
            bare = deepcopy(trainer.model.network).train()
            optimizer = torch.optim.SGD(bare.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
            amp, batches = "precision.amp=bf16" in overrides, cycle(premade)
            measured["bare"] = lambda: bare_step(bare, optimizer, amp, *next(batches))
        # The first is the warmup.
        times = [{name: window_ms(step, steps) for name, step in measured.items()} for _ in range(windows + 1)][1:]
        result: dict[str, object] = {"memory_format": str(trainer.model.memory_format).removeprefix("torch.")}
        for name, step in measured.items():
            milliseconds = statistics.median(window[name] for window in times)
            result[name] = {"ms": milliseconds, "images_per_second": batch / milliseconds * 1e3}
            result[f"{name}_launches"] = launches_per_step(step)
        if "bare" in measured:
            result["ratio"] = statistics.median(window["ours"] / window["bare"] for window in times)
        return result


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
