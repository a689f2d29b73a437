"""Benchmark the stream pipeline on 2,000 JPEGs of 256x256: `python tests/bench/photos.py [PAIRS] [WORKERS]`.

Compares it with the DataLoader of torchvision's reference recipe at the same number of workers: the loaders alone, and
training ResNet-18 on 64x64 crops in the same loop on the CPU. The two alternate; medians are printed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.transforms import v2

from engine.config.loader import resolve_config
from engine.data.pipelines.device import StreamingLoader
from engine.data.pipelines.loader import BatchLoader
from engine.data.sampler import DistributedBatchSampler
from engine.data.sources.folder import IMAGENET_RGB_STATS
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source

IMAGES, CLASSES, SIDE, SIZE, BATCH = 2000, 2, 256, 64, 64
# Warmup batches before a measurement, and batches trained per measurement.
FIRST, TRAINED = 2, 8
Pairs = Iterator[tuple[Tensor, Tensor]]


def make_photos(root: Path) -> None:
    """Write JPEGs of smooth colors with fine noise."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = Image.fromarray(rng.integers(0, 256, (18, 18, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(int)
        folder = root / f"class-{number % CLASSES}"
        folder.mkdir(exist_ok=True)
        noisy = (smooth + rng.integers(-8, 9, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number}.jpg", quality=90)


def reference_loader(root: Path, workers: int) -> Pairs:
    """DataLoader as in torchvision's references/classification/presets.py with the PIL backend."""
    recipe = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            transforms.Normalize(*IMAGENET_RGB_STATS),
        ]
    )
    data = torchvision.datasets.ImageFolder(str(root), recipe)
    context = "fork" if workers else None
    return iter(
        DataLoader(data, BATCH, shuffle=True, num_workers=workers, drop_last=True, multiprocessing_context=context)
    )


def gputrain_loader(root: Path, workers: int) -> Pairs:
    data = [f"data.path={root}", "data.dataset=folder", f"data.image_size={SIZE}", "data.val_split=0.001"]
    config = resolve_config(
        None, [*data, f"data.batch_size={BATCH}", "augment.resized_crop=true", "augment.flip=true"]
    ).config
    source = open_source(config)
    images = model_input_format(config, source)
    shares = DistributedBatchSampler(source.num_images("train"), source.num_images("val"), BATCH, 0, 1, True, 0)
    batches = StreamingLoader(
        BatchLoader(source, config, images, shares.train_requests(1), workers), images, torch.device("cpu")
    )
    return ((batch.images, batch.labels) for batch in iter(batches.__next__, None))


def loader_rate(pairs: Pairs) -> float:
    """Throughput of the loader alone in images/s, without the startup of its workers."""
    for _ in range(FIRST):
        next(pairs)
    start = time.perf_counter()
    count = sum(len(labels) for _, labels in pairs)
    return count / (time.perf_counter() - start)


def training_rate(pairs: Pairs) -> float:
    """Throughput of training on the loaded batches in images/s."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of, count, start = nn.CrossEntropyLoss(), 0, 0.0
    for number in range(FIRST + TRAINED):
        if number == FIRST:
            start = time.perf_counter()
        images, labels = next(pairs)
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()
        count += len(labels) if number >= FIRST else 0
    return count / (time.perf_counter() - start)


def print_result(label: str, rows: Iterable[tuple[float, float]]) -> None:
    rows = list(rows)
    theirs, mine = (statistics.median(column) for column in zip(*rows, strict=True))
    ratios = sorted(mine / theirs for theirs, mine in rows)
    middle = statistics.median(ratios)
    print(
        f"{label}: reference {theirs:.0f} images/s, gputrain {mine:.0f} images/s, "
        f"ratio {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_photos(root)
        for _ in gputrain_loader(root, 0):
            # Fill the cache of the folder scan.
            break
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {workers} DataLoader workers")
        print_result(
            "loader alone",
            (
                (loader_rate(reference_loader(root, workers)), loader_rate(gputrain_loader(root, workers)))
                for _ in range(pairs)
            ),
        )
        print_result(
            "training",
            (
                (training_rate(reference_loader(root, workers)), training_rate(gputrain_loader(root, workers)))
                for _ in range(pairs)
            ),
        )


if __name__ == "__main__":
    main()
