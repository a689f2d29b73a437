"""Stage c: ResNet-18 on Fashion-MNIST to the accuracy that Dive into Deep Learning reports, and seconds per epoch."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from speed import epoch_figures
from stage import Context, Row, Step, StepFailedError, StepSkippedError

from engine.data.sources.builtin import TORCHVISION_DATASETS

DATASET = TORCHVISION_DATASETS["fashion-mnist"]
# Dive into Deep Learning, Concise Implementation for Multiple GPUs, PyTorch edition, on one GPU that it does not name.
PUBLISHED_ACCURACY, PUBLISHED_SECONDS = 0.91, 12.2


def unpack(context: Context) -> Path:
    """Copy the files of the dataset, compressed or not, from anywhere below --data to where training reads them."""
    target = context.folder.parent / "data"
    raw = target / DATASET.folder
    raw.mkdir(parents=True, exist_ok=True)
    for name in DATASET.files:
        found = sorted(context.data.rglob(f"{name}*")) if context.data is not None else []
        if not found:
            raise StepSkippedError(f"needs --data FOLDER with {name}.gz and the other files of Fashion-MNIST")
        opened = gzip.open if found[0].suffix == ".gz" else open
        with opened(found[0], "rb") as source, (raw / name).open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return target


def train(context: Context, title: str, gpus: int, *keys: str) -> list[Row]:
    data = unpack(context)
    options = ("fashion-mnist", "--data-path", str(data), "data.download=false", f"--gpus=free:{gpus}")
    small = () if context.machine.has_card else ("--epochs", "1", "model.options={width: 1}")
    run = context.train("run", *options, *small, *keys)
    figures = epoch_figures(run)
    seconds = figures["seconds"] or run.events("epoch")[0]["seconds"]
    best, last = run.summary["best_val_accuracy"], run.summary["val_accuracy"]
    figures |= {"best_val_accuracy": best, "val_accuracy": last}
    if context.machine.has_card and last < PUBLISHED_ACCURACY:
        raise StepFailedError(f"accuracy {last:.2%} (best {best:.2%}), published on one GPU {PUBLISHED_ACCURACY:.0%}")
    accuracy = f"accuracy {last:.2%} (best {best:.2%}) after {run.summary['epochs']} epochs"
    published = f" (published on one GPU: {PUBLISHED_SECONDS} s)" if context.machine.has_card else ""
    return [Row(title, f"{accuracy}, {seconds:.2f} s per epoch{published}", figures)]


def step(title: str, *keys: str, gpus: int = 1, card: bool = True) -> Step:
    return Step(title, lambda context: train(context, title, gpus, *keys), 150, gpus=gpus, card=card)


STEPS = [
    step("Fashion-MNIST in bf16", "precision.amp=bf16", card=False),
    step("Fashion-MNIST in float32, as published", "precision.amp=off", "precision.tf32=off", card=False),
    step("Fashion-MNIST on two GPUs", "precision.amp=bf16", gpus=2),
    step("Fashion-MNIST in bf16, compiled", "precision.amp=bf16", "model.compile=true"),
    step(
        "Fashion-MNIST in bf16, reduce-overhead",
        "precision.amp=bf16",
        "model.compile=true",
        "model.compile_mode=reduce-overhead",
    ),
]
