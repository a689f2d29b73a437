"""A trained model for other programs: its weights as safetensors, and a JSON file of all that is needed to use them."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from engine.data.sources.base import ImageFormat
from engine.inference.trained_model import Saved, build_trained
from engine.runs.events import Epoch
from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError
from engine.utils.files import read_json, replace_file, write_json

EXPORT_FORMAT = 1
WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"


def export(saved: Saved, run: RunFolder, folder: Path, *, force: bool = False) -> list[Path]:
    """Write the weights and what they are into `folder`. Each file is whole or absent. Files of anything else but this
    run's export are overwritten only with `force`. Raises UsageError."""
    paths = [folder / WEIGHTS, folder / DESCRIPTION]
    foreign = [path for path in paths if path.exists()]
    before = read_json(folder / DESCRIPTION) or {}
    if foreign and not force and (before.get("gputrain") is None or before.get("run") != run.name):
        raise UsageError.one(str(foreign[0]), f"is not of {run.name}; give another --output, or overwrite with --force")
    # Weights that do not fit their model are of use to no one.
    weights = plain(build_trained(saved, "cpu").model.state_dict())
    description = describe(saved, run)
    # Of another network with as many classes it must be known that they are others, see `engine.models.transfer`.
    metadata = {"format": "pt", "classes": json.dumps(list(saved.classes))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(paths[0], lambda file: file.write(save(weights, metadata)), durable=True)
        write_json(paths[1], description)
    except OSError as error:
        raise UsageError.one(str(folder), f"cannot be written to: {error.strerror or error}") from error
    return paths


def plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor on the CPU, contiguous, in memory of its own: safetensors knows no two names for the same."""
    return {
        name: value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype).contiguous().clone()
        for name, value in state.items()
    }


def describe(saved: Saved, run: RunFolder) -> dict[str, Any]:
    model, images = saved.config.model, saved.image_format
    epoch = epoch_of(saved, run)
    accuracy = None if epoch is None else epoch.ema_val_accuracy if saved.ema else epoch.val_accuracy
    return {
        "format": EXPORT_FORMAT,
        "gputrain": version("gputrain"),
        "run": run.name,
        "checkpoint": saved.path.name,
        "step": saved.step,
        "epoch": None if epoch is None else epoch.epoch,
        "val_accuracy": accuracy if accuracy is not None and accuracy == accuracy else None,
        "ema": saved.ema,
        "model": {"source": model.source, "name": model.name, "options": model.options},
        "classes": list(saved.classes),
        "image": {
            "size": images.size,
            "channels": images.channels,
            "mean": list(images.mean),
            "std": list(images.std),
        },
        "transforms": transforms_of(images),
        "output": "sigmoid" if saved.config.loss.name == "bce" else "softmax",
    }


def transforms_of(images: ImageFormat) -> list[dict[str, Any]]:
    """What is done to an image file before the model sees it, in this order. `central_square` is the largest square in
    the image's middle, which is cut out and then resized."""
    return [
        {"name": "exif_transpose"},
        {"name": "convert", "mode": "L" if images.channels == 1 else "RGB"},
        {
            "name": "resize",
            "box": "central_square",
            "size": [images.size, images.size],
            "interpolation": "bilinear",
            "antialias": True,
        },
        {"name": "divide", "by": 255},
        {"name": "normalize", "mean": list(images.mean), "std": list(images.std)},
    ]


def epoch_of(saved: Saved, run: RunFolder) -> Epoch | None:
    """The epoch that ended with this checkpoint; None for one that was saved between."""
    return next((epoch for epoch in run.history().epochs if epoch.step == saved.step), None)
