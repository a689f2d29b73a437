"""Benchmark the memory pipeline on a GPU: `python tests/bench/memory_pipeline.py [PAIRS]`.

Compares the throughput on data of CIFAR-10's shape with that of a loader of airbench's design (Jordan, 2024: all images
on the device, augmented one epoch at a time), in turns. Prints a row of a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config.loader import resolve_config
from engine.data.decoded import load_in_memory
from engine.data.memory import InMemoryLoader
from engine.data.sampler import DistributedBatchSampler
from engine.data.sources.base import ArraySource, ImageFormat

PADDING = 2


def memory_pipeline_rate(images: np.ndarray, labels: np.ndarray, batch_size: int, device: torch.device) -> float:
    """Throughput of the memory pipeline in images/s, after one epoch of warmup."""
    image_format = ImageFormat(32, 3, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    source = ArraySource(
        image_format, tuple("0123456789"), {"train": images, "val": images[:8]}, {"train": labels, "val": labels[:8]}
    )
    overrides = [f"augment.crop_padding={PADDING}", "augment.flip=true", f"data.batch_size={batch_size}"]
    config = resolve_config(None, overrides).config
    shares = DistributedBatchSampler(len(images), 8, batch_size, 0, 1, True, 0)
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
    return steps * batch_size / (time.perf_counter() - started_at)


def airbench_rate(images: np.ndarray, labels: np.ndarray, batch_size: int, device: torch.device) -> float:
    """Throughput of airbench's design in images/s.

    Float16 images are normalized and padded once; each epoch flips and crops all of them, then indexes random batches.
    """
    count = len(images)
    padded = F.pad((torch.from_numpy(images).to(device).half() / 255 - 0.48) / 0.25, (PADDING,) * 4, "reflect")
    targets = torch.from_numpy(labels).to(device)
    rates = []
    for _ in range(2):
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        augmented = random_crop(torch.where(torch.rand(count, 1, 1, 1, device=device) < 0.5, padded.flip(-1), padded))
        order = torch.randperm(count, device=device)
        for start in range(0, count - batch_size + 1, batch_size):
            batch = order[start : start + batch_size]
            _ = augmented[batch], targets[batch]
        torch.cuda.synchronize()
        rates.append(count // batch_size * batch_size / (time.perf_counter() - started_at))
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
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="?", type=int, default=5)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    arguments = parser.parse_args()
    random, device = np.random.default_rng(0), torch.device("cuda", 0)
    pixels = random.integers(0, 256, (arguments.images, 3, 32, 32), np.uint8)
    data = pixels, random.integers(0, 10, arguments.images), arguments.batch_size, device
    rates = [(memory_pipeline_rate(*data), airbench_rate(*data)) for _ in range(arguments.pairs)]
    mine, theirs = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(rate / reference_rate for rate, reference_rate in rates)
    print(f"| memory pipeline, relative to airbench's loader | {ratio:.2f} ({mine:,.0f} and {theirs:,.0f} images/s) |")


if __name__ == "__main__":
    main()
