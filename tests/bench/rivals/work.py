"""Workload shared by all programs: a small CNN on grayscale 28x28 images in MNIST format, with random crops."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path

import numpy as np
import torch
from torch import nn

TRAIN, VAL, CLASSES = 4000, 1000, 10
BATCH, EPOCHS, RANKS, WORKERS = 64, 5, 2, 1
LR, MOMENTUM, PADDING = 0.05, 0.9, 4
MEAN, STD = (0.2860,), (0.3530,)


def write_images(folder: Path) -> None:
    """Write files where torchvision expects FashionMNIST. Each class is a bright patch at its own position."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", TRAIN), ("t10k", VAL)):
        labels = random.integers(0, CLASSES, count).astype(np.uint8)
        images = random.integers(0, 128, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            top, left = label // 4 * 9, label % 4 * 7
            image[top : top + 9, left : left + 7] += 96
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, count, 28, 28) + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + labels.tobytes())


def network() -> nn.Module:
    """gputrain's built-in model `cnn`."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, CLASSES)),
    )


def datasets(folder: str) -> list[torch.utils.data.Dataset[tuple[torch.Tensor, int]]]:
    """Training and validation datasets with standard torchvision transforms."""
    from torchvision import transforms
    from torchvision.datasets import FashionMNIST

    plain = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    varied = [transforms.RandomCrop(28, padding=PADDING), *plain]
    return [
        FashionMNIST(folder, train=train, transform=transforms.Compose(steps))
        for train, steps in ((True, varied), (False, plain))
    ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def print_epochs(epochs: list[float]) -> None:
    """Print the training seconds of each epoch as JSON for `rivals.py`."""
    print(json.dumps({"epochs": epochs}), flush=True)
