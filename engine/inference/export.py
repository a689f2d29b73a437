"""Export of a trained model: weights as safetensors, and a JSON description of the model and its preprocessing.

Called by `gputrain export`. `engine.models.transfer` loads exported weights as pretrained weights.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from engine.data.sources.base import ImageFormat
from engine.inference.trained_model import TrainedCheckpoint, build_trained_model
from engine.runs.events import EpochEvent
from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError
from engine.utils.files import read_json, replace_file, shown_path, write_json

EXPORT_FORMAT = 1
WEIGHTS_FILE, DESCRIPTION_FILE = "model.safetensors", "model.json"


def export_model(checkpoint: TrainedCheckpoint, run: RunFolder, folder: Path, *, force: bool = False) -> list[Path]:
    """Write model.safetensors and model.json to `folder` and return their paths. Each file is written atomically.

    Without `force`, only files of an earlier export of the same run are overwritten. Raises UsageError if `folder`
    contains other files of these names or cannot be written to.
    """
    paths = [folder / WEIGHTS_FILE, folder / DESCRIPTION_FILE]
    existing = [path for path in paths if path.exists()]
    previous = read_json(folder / DESCRIPTION_FILE) or {}
    if existing and not force and (previous.get("gputrain") is None or previous.get("run") != run.name):
        raise UsageError.one(
            str(shown_path(existing[0])),
            f"was not exported from {run.name}; set another --output, or overwrite with --force",
        )
    # Building the model checks that the weights match it before anything is written.
    weights = standalone_state_dict(build_trained_model(checkpoint, "cpu").model.state_dict())
    description = model_description(checkpoint, run)
    # engine.models.transfer compares the class names, because another dataset may have the same number of classes.
    metadata = {"format": "pt", "classes": json.dumps(list(checkpoint.classes))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(paths[0], lambda file: file.write(save(weights, metadata)), durable=True)
        write_json(paths[1], description)
    except OSError as error:
        raise UsageError.one(str(shown_path(folder)), f"cannot be written to: {error.strerror or error}") from error
    return list(map(shown_path, paths))


def standalone_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy each tensor to contiguous CPU memory of its own, floating-point tensors as float32.

    safetensors cannot save tensors that share memory.
    """
    return {
        name: value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype).contiguous().clone()
        for name, value in state.items()
    }


def model_description(checkpoint: TrainedCheckpoint, run: RunFolder) -> dict[str, Any]:
    """Return the content of model.json: origin, architecture, classes, preprocessing and output activation."""
    model, images = checkpoint.config.model, checkpoint.image_format
    epoch = find_epoch(checkpoint, run)
    accuracy = None if epoch is None else epoch.ema_val_accuracy if checkpoint.ema else epoch.val_accuracy
    return {
        "format": EXPORT_FORMAT,
        "gputrain": version("gputrain"),
        "run": run.name,
        "checkpoint": checkpoint.path.name,
        "step": checkpoint.step,
        "epoch": None if epoch is None else epoch.epoch,
        "val_accuracy": accuracy if accuracy is not None and accuracy == accuracy else None,
        "ema": checkpoint.ema,
        "model": {"source": model.source, "name": model.name, "options": model.options},
        "classes": list(checkpoint.classes),
        "image": {
            "size": images.size,
            "channels": images.channels,
            "mean": list(images.mean),
            "std": list(images.std),
        },
        "transforms": describe_transforms(images),
        "output": "sigmoid" if checkpoint.config.loss.name == "bce" else "softmax",
    }


def describe_transforms(image_format: ImageFormat) -> list[dict[str, Any]]:
    """Return the preprocessing steps from image file to model input, in order.

    The box `central_square` is the largest centered square of the image, which is cropped before resizing.
    """
    return [
        {"name": "exif_transpose"},
        {"name": "convert", "mode": "L" if image_format.channels == 1 else "RGB"},
        {
            "name": "resize",
            "box": "central_square",
            "size": [image_format.size, image_format.size],
            "interpolation": "bilinear",
            "antialias": True,
        },
        {"name": "divide", "by": 255},
        {"name": "normalize", "mean": list(image_format.mean), "std": list(image_format.std)},
    ]


def find_epoch(checkpoint: TrainedCheckpoint, run: RunFolder) -> EpochEvent | None:
    """Return the epoch at whose end the checkpoint was saved, None for a checkpoint saved within an epoch."""
    return next((epoch for epoch in run.history().epochs if epoch.step == checkpoint.step), None)
