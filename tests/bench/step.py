"""Benchmark a training step against a bare PyTorch loop.

Usage: `python tests/bench/step.py [--model NAME] [--steps N] [--batch N] [--size N] [KEY=VALUE ...]`, with config keys.

One rank trains on premade batches, on one CPU thread or on the first GPU. gputrain's steps and those of the bare loop
alternate; prints medians, and quartiles of the ratio of adjacent steps. Then prints the CPU time of telemetry within a
step, including the control messages between two ranks, and compares evaluation with a bare one.

The bare loop is SGD on a copy of the model in the same memory format. `model.channels_last=off` and
`precision.amp=bf16` apply to both.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.runs.control import RequestCounters
from engine.train.data.batch import DeviceBatch
from engine.train.distributed.agreement import POLL_INTERVAL_SECONDS, Agreement
from engine.train.loop.evaluation import evaluate
from engine.train.loop.loop import train_step
from engine.train.loop.trainer import Trainer
from support.runs.in_process import PremadeBatches, single_rank_trainer

BATCHES = 8
EVALUATED = 20
LR = 0.01
AGREEMENT_CALLS = 300


def bare_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, bf16: bool) -> None:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


def timed(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Run a step; return its wall time and CPU time in milliseconds."""
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - wall_start) * 1e3, (time.process_time() - cpu_start) * 1e3


def format_row(label: str, bare: list[float], ours: list[float]) -> str:
    low, middle, high = statistics.quantiles((mine / other for other, mine in zip(bare, ours, strict=True)), n=4)
    times = f"bare {statistics.median(bare):.3f} ms, ours {statistics.median(ours):.3f} ms"
    return f"{label:<9} {times}, ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {len(ours)} pairs)"


@contextmanager
def counted(parts: list[tuple[Any, str]], spent: dict[str, float]) -> Iterator[None]:
    """Add the CPU seconds spent in the named functions to `spent`; nested calls count for the outer one."""
    inside = False

    def timing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return function(*args, **kwargs)
            inside, used = True, time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.process_time() - used
                inside = False

        return call

    before = [(owner, name, getattr(owner, name)) for owner, name in parts]
    for owner, name, function in before:
        setattr(owner, name, timing(f"{type(owner).__name__}.{name}", function))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def telemetry(trainer: Trainer, steps: int) -> dict[str, float]:
    """CPU time per step in microseconds, by telemetry function."""
    log, spent = trainer.log, dict[str, float]()
    parts = [(log.channel, name) for name in ("enter_phase", "send", "poll_requests")]
    parts += [(log, "add_step")]
    empty = time.process_time()
    for _ in range(1000):
        time.process_time()
    clock = (time.process_time() - empty) / 1000
    with counted([*parts, (trainer.control, "handle_requests")], spent):
        for _ in range(steps):
            trainer.control.handle_requests()
            train_step(trainer)
    return {name: seconds / steps * 1e6 - clock * 1e6 for name, seconds in spent.items()}


def measure_agreement(rank: int, path: str, answers: Any) -> None:
    """Measure the CPU time of one Agreement call in microseconds, including its threads, as one of two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    agreement = Agreement(dist.group.WORLD)
    cpu_start = time.process_time()
    for _ in range(AGREEMENT_CALLS):
        agreement(RequestCounters)
        # With a pending pause request, every call communicates.
        agreement.wait_pending().pause_toggles = 1
    answers.put((time.process_time() - cpu_start) / AGREEMENT_CALLS * 1e6)
    dist.barrier()
    dist.destroy_process_group()


def agreement_microseconds(folder: Path) -> float:
    """CPU time of one Agreement call in microseconds: the mean over two ranks."""
    answers: Any = mp.get_context("spawn").SimpleQueue()
    mp.spawn(measure_agreement, (str(folder), answers), nprocs=2)
    return float(statistics.mean(answers.get() for _ in range(2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=28)
    options, overrides = parser.parse_known_args()
    recipe = {"model.name": options.model, "data.batch_size": options.batch, "data.image_size": options.size}
    recipe |= {"data.dataset": "fake", "data.channels": 1, "data.fake_train": 1000000}
    recipe |= {"data.fake_val": options.batch * EVALUATED, "optim.lr": LR, "schedule.name": "constant"}
    recipe |= {"schedule.warmup_epochs": 0} | dict(override.split("=", 1) for override in overrides)
    with single_rank_trainer(
        *(f"{key}={value}" for key, value in recipe.items()), on_gpu=torch.cuda.is_available()
    ) as trainer:
        bare, bf16 = deepcopy(trainer.model.network).train(), recipe.get("precision.amp") == "bf16"
        optimizer = torch.optim.SGD(bare.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4, fused=True)
        shape = (options.batch, trainer.data.image_format.channels, options.size, options.size)
        premade = [
            (
                torch.randn(shape, device=trainer.device),
                torch.randint(trainer.data.num_classes, shape[:1], device=trainer.device),
            )
            for _ in range(BATCHES)
        ]
        trainer.data.batches = PremadeBatches([DeviceBatch(images, labels, 1.0) for images, labels in premade])
        batches = cycle(
            [(images.contiguous(memory_format=trainer.model.memory_format), labels) for images, labels in premade]
        )

        def trainer_step() -> None:
            trainer.control.handle_requests()
            train_step(trainer)

        for _ in range(20):
            bare_step(bare, optimizer, *next(batches), bf16)
            trainer_step()
        # As a run does: the collection after 500 steps would traverse all imported modules.
        gc.freeze()
        rows = []
        for number in range(options.steps):
            pair = [lambda: bare_step(bare, optimizer, *next(batches), bf16), trainer_step]
            # Alternate which of the two runs first.
            timings = [timed(step, trainer.device) for step in (pair if number % 2 else pair[::-1])]
            rows.append(timings if number % 2 else timings[::-1])
        for column, clock in enumerate(("wall", "CPU time")):
            print(format_row(clock, [row[0][column] for row in rows], [row[1][column] for row in rows]), flush=True)

        step = statistics.median(row[1][1] for row in rows) * 1e3
        spent = telemetry(trainer, options.steps)
        with tempfile.TemporaryDirectory() as folder:
            agreement_us = agreement_microseconds(Path(folder) / "rendezvous")
        spent["agreement, two ranks"] = agreement_us * min(step / (POLL_INTERVAL_SECONDS * 1e6), 1.0)
        for name, part in (*spent.items(), ("all", sum(spent.values()))):
            print(f"telemetry {name:<22} {part:7.1f} us of {step:.0f} us a step, {part / step:.3%}")

        def bare_evaluation() -> None:
            bare.eval()
            correct = torch.zeros((), device=trainer.device)
            with torch.no_grad():
                for _ in range(EVALUATED):
                    images, labels = next(batches)
                    correct += (bare(images).argmax(1) == labels).sum()
            correct.item()

        rows = [
            (timed(bare_evaluation, trainer.device), timed(lambda: evaluate(trainer), trainer.device))
            for _ in range(12)
        ]
        print(format_row("evaluate", [row[0][0] for row in rows[2:]], [row[1][0] for row in rows[2:]]))


if __name__ == "__main__":
    main()
