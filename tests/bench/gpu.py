"""Benchmark training and the memory pipeline on one GPU: `python tests/bench/gpu.py [PAIRS]`.

1. ResNet-18 on data of Fashion-MNIST's shape in bf16, compiled and not: seconds per epoch, throughput relative to the
   same steps without input, and MFU.
2. Throughput of the memory pipeline on data of CIFAR-10's shape, compared with a loader of airbench's design (Jordan,
   2024: all images on the device, augmented one epoch at a time).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config.loader import resolve_config
from engine.data.pipelines.in_memory_images import load_in_memory
from engine.data.pipelines.memory import InMemoryLoader
from engine.data.sampler import DistributedBatchSampler
from engine.data.sources.array import ArraySource
from engine.data.sources.base import ImageFormat

GPUTRAIN = Path(sys.executable).with_name("gputrain")
EPOCHS = 6
# For comparison, Dive into Deep Learning reports 14.0 s per epoch on one GPU, 8.8 s on two.
RESNET = ["data.dataset=fake", "data.fake_train=60000", "data.fake_val=10000", "data.image_size=28", "data.channels=1"]
RESNET += ["model.name=resnet18-small", "data.batch_size=256", "precision.amp=bf16", "augment.crop_padding=2"]
IMAGES, BATCH, PADDING = 50_000, 1024, 2


def run_medians(*keys: str) -> dict[str, float]:
    """Run with these overrides; return medians over all epochs but the first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(GPUTRAIN), "run", "--headless", "--json", "--gpus", "free:1", f"--runs-dir={folder}", *RESNET]
        finished = subprocess.run([*command, f"run.epochs={EPOCHS}", *keys], capture_output=True, text=True, check=True)
        summary = json.loads(next(Path(folder).glob("*/summary.json")).read_text())
    epochs = [event for event in map(json.loads, finished.stdout.splitlines()) if event["type"] == "epoch"][1:]
    rate = statistics.median(epoch["images_per_second"] for epoch in epochs)
    seconds = statistics.median(epoch["seconds"] for epoch in epochs)
    return {"seconds": seconds, "rate": rate, "mfu": summary.get("mfu") or float("nan")}


def memory_pipeline_rate(images: np.ndarray, labels: np.ndarray, device: torch.device) -> float:
    """Throughput of the memory pipeline in images/s, after one epoch of warmup."""
    image_format = ImageFormat(32, 3, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    source = ArraySource(
        image_format, tuple("0123456789"), {"train": images, "val": images[:8]}, {"train": labels, "val": labels[:8]}
    )
    config = resolve_config(
        None, [f"augment.crop_padding={PADDING}", "augment.flip=true", f"data.batch_size={BATCH}"]
    ).config
    shares = DistributedBatchSampler(IMAGES, 8, BATCH, 0, 1, True, 0)
    requests = [*shares.train_requests(1), *shares.train_requests(2)]
    batches = InMemoryLoader(load_in_memory(source, config, image_format), config, image_format, requests, device)
    steps = len(requests) // 2
    for _ in range(steps):
        next(batches)
    torch.cuda.synchronize()
    started_at = time.perf_counter()
    for _ in range(steps):
        next(batches)
    torch.cuda.synchronize()
    return steps * BATCH / (time.perf_counter() - started_at)


def airbench_rate(images: np.ndarray, labels: np.ndarray, device: torch.device) -> float:
    """Throughput of airbench's design in images/s.

    Float16 images are normalized and padded once; each epoch flips and crops all of them, then indexes random batches.
    """
    padded = F.pad((torch.from_numpy(images).to(device).half() / 255 - 0.48) / 0.25, (PADDING,) * 4, "reflect")
    targets = torch.from_numpy(labels).to(device)
    rates = []
    for _ in range(2):
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        augmented = random_crop(torch.where(torch.rand(IMAGES, 1, 1, 1, device=device) < 0.5, padded.flip(-1), padded))
        order = torch.randperm(IMAGES, device=device)
        for start in range(0, IMAGES - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            _ = augmented[batch], targets[batch]
        torch.cuda.synchronize()
        rates.append(IMAGES // BATCH * BATCH / (time.perf_counter() - started_at))
    return rates[-1]


def random_crop(padded: Tensor) -> Tensor:
    """Crop padded images at random offsets, all images of the same offset together."""
    size = padded.shape[-1] - 2 * PADDING
    shifts = torch.randint(0, 2 * PADDING + 1, (len(padded), 2), device=padded.device)
    out = torch.empty((*padded.shape[:2], size, size), device=padded.device, dtype=padded.dtype)
    for row in range(2 * PADDING + 1):
        for column in range(2 * PADDING + 1):
            mask = (shifts[:, 0] == row) & (shifts[:, 1] == column)
            out[mask] = padded[mask, :, row : row + size, column : column + size]
    return out


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    limit = run_medians("data.pipeline=fixed")["rate"]
    for compiled in ("false", "true"):
        result = run_medians("data.pipeline=memory", f"model.compile={compiled}")
        share = result["rate"] / limit
        rates = f"{result['rate']:.0f} images/s, {share:.2f} of the uncompiled limit, MFU {result['mfu']:.1%}"
        print(
            f"model.compile={compiled}: {result['seconds']:.2f} s per epoch including evaluation, {rates}", flush=True
        )
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (IMAGES, 3, 32, 32), np.uint8)
    labels = random.integers(0, 10, IMAGES)
    rates = [
        (memory_pipeline_rate(images, labels, device), airbench_rate(images, labels, device)) for _ in range(pairs)
    ]
    mine, theirs = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(rate / reference_rate for rate, reference_rate in rates)
    print(f"loaders: memory pipeline {mine:.0f} images/s, airbench's design {theirs:.0f} images/s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
