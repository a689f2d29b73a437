"""Benchmark training and the memory pipeline on GPUs: `python tests/bench/gpu.py [PAIRS] [--images N]`.

It prints the rows of a Markdown table:

1. ResNet-18 on data of Fashion-MNIST's shape in bf16 on 1, 2, 4, ... GPUs: seconds per epoch with its evaluation, and
   the speedup over one GPU. Dive into Deep Learning reports 14.0 s per epoch on one GPU and 8.8 s on two.
2. On one GPU: throughput relative to a bare PyTorch loop on images that are already on the device, and to gputrain's
   own steps without input; with torch.compile, and MFU.
3. Throughput of the memory pipeline on data of CIFAR-10's shape, relative to a loader of airbench's design (Jordan,
   2024: all images on the device, augmented one epoch at a time).
"""

from __future__ import annotations

import argparse
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
from engine.models.factory import build_model
from engine.utils.text import pluralize

GPUTRAIN = Path(sys.executable).with_name("gputrain")
EPOCHS = 6
RESNET_BATCH = 256
RESNET = ["data.dataset=fake", "data.image_size=28", "data.channels=1", "augment.crop_padding=2"]
RESNET += ["model.name=resnet18-small", f"data.batch_size={RESNET_BATCH}", "precision.amp=bf16"]
IMAGES, BATCH, PADDING = 50_000, 1024, 2


def run_medians(images: int, gpus: int, *keys: str) -> dict[str, float]:
    """Train on `gpus` GPUs with these overrides; return medians over all epochs but the first."""
    sizes = [f"data.fake_train={images}", f"data.fake_val={images // 6}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(GPUTRAIN), "run", "--headless", "--json", f"--gpus=free:{gpus}", f"--runs-dir={folder}"]
        command += [*RESNET, *sizes]
        finished = subprocess.run([*command, f"run.epochs={EPOCHS}", *keys], capture_output=True, text=True, check=True)
        summary = json.loads(next(Path(folder).glob("*/summary.json")).read_text())
    epochs = [event for event in map(json.loads, finished.stdout.splitlines()) if event["type"] == "epoch"][1:]
    rate = statistics.median(epoch["images_per_second"] for epoch in epochs)
    seconds = statistics.median(epoch["seconds"] for epoch in epochs)
    return {"seconds": seconds, "rate": rate, "mfu": summary.get("mfu") or float("nan")}


def bare_loop_rate(images: int, device: torch.device) -> float:
    """Throughput of a plain PyTorch loop in images/s: the same model in bf16, on batches that are on the device."""
    config = resolve_config(None, [*RESNET, "data.num_classes=10"]).config
    model = build_model(config, channels=1, num_classes=10, image_size=28)
    model = model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    inputs = torch.rand(images, 1, 28, 28, device=device)
    targets = torch.randint(0, 10, (images,), device=device)
    torch.backends.cudnn.benchmark = True
    rates = []
    for _ in range(3):
        order = torch.randperm(images, device=device)
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        for start in range(0, images - RESNET_BATCH + 1, RESNET_BATCH):
            batch = order[start : start + RESNET_BATCH]
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(
                    model(inputs[batch].contiguous(memory_format=torch.channels_last)), targets[batch]
                )
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        rates.append(images // RESNET_BATCH * RESNET_BATCH / (time.perf_counter() - started_at))
    return statistics.median(rates[1:])


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


def print_row(measurement: str, result: str) -> None:
    print(f"| {measurement} | {result} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="?", type=int, default=5)
    parser.add_argument("--images", type=int, default=60_000, help="Training images of one epoch.")
    arguments = parser.parse_args()
    device, images = torch.device("cuda", 0), arguments.images
    print_row("GPU", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, torch {torch.__version__}")

    one_gpu = 0.0
    for gpus in (count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()):
        result = run_medians(images, gpus, "data.pipeline=memory")
        one_gpu = one_gpu or result["rate"]
        speedup = f"{result['rate'] / one_gpu:.2f}x the images/s of one GPU"
        print_row(
            f"ResNet-18 on {pluralize(gpus, 'GPU')}",
            f"{result['seconds']:.2f} s per epoch, {speedup}, MFU {result['mfu']:.1%}",
        )

    bare, limit = bare_loop_rate(images, device), run_medians(images, 1, "data.pipeline=fixed")["rate"]
    print_row("ResNet-18, relative to a bare loop", f"{one_gpu / bare:.2f} ({one_gpu:.0f} and {bare:.0f} images/s)")
    print_row("ResNet-18, relative to its steps without input", f"{one_gpu / limit:.2f}")
    compiled = run_medians(images, 1, "data.pipeline=memory", "model.compile=true")
    print_row("ResNet-18, torch.compile", f"{compiled['seconds']:.2f} s per epoch, {compiled['rate'] / one_gpu:.2f}x")

    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (IMAGES, 3, 32, 32), np.uint8)
    labels = random.integers(0, 10, IMAGES)
    rates = [
        (memory_pipeline_rate(pixels, labels, device), airbench_rate(pixels, labels, device))
        for _ in range(arguments.pairs)
    ]
    mine, theirs = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(rate / reference_rate for rate, reference_rate in rates)
    print_row("memory pipeline, relative to airbench's loader", f"{ratio:.2f} ({mine:.0f} and {theirs:.0f} images/s)")


if __name__ == "__main__":
    main()
