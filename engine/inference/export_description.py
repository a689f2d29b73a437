"""Describe an export for its model.json: origin, architecture, classes and files.

`engine.inference.export` calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version

import torch
from torch import Tensor

from engine.inference.export_program import INPUT_NAME, OUTPUT_NAME
from engine.inference.model_json import (
    Architecture,
    ExportedFile,
    ExportFormat,
    InputImage,
    ModelDescription,
    StoredProof,
    TensorDescription,
)
from engine.inference.trained_model import TrainedCheckpoint
from engine.runs.events import EpochEvent
from engine.runs.folder import RunFolder
from engine.runs.history import History


def describe_model(checkpoint: TrainedCheckpoint, run: RunFolder, history: History) -> ModelDescription:
    """Return what model.json says about the model, without its files."""
    model, images = checkpoint.config.model, checkpoint.image_format
    epoch = find_epoch(checkpoint, history)
    scores = None if epoch is None else epoch.ema if checkpoint.ema else epoch.val
    return ModelDescription(
        gputrain=version("gputrain"),
        run=run.name,
        checkpoint=checkpoint.path.name,
        step=checkpoint.step,
        epoch=None if epoch is None else epoch.epoch,
        val_accuracy=None if scores is None else scores.accuracy,
        ema=checkpoint.ema,
        weights_sha256=hash_weights(checkpoint.weights),
        model=Architecture(source=model.source, name=model.name, options=model.options),
        classes=tuple(checkpoint.classes),
        image=InputImage(size=images.val_size, channels=images.channels, mean=images.mean, std=images.std),
        tta=checkpoint.config.eval.tta,
        output="sigmoid" if checkpoint.config.loss.name == "bce" else "softmax",
    )


def describe_file(
    file_format: ExportFormat, description: ModelDescription, sha256: str, proof: StoredProof
) -> ExportedFile:
    """Return what model.json says about a file of the model."""
    image, is_program = description.image, file_format != "safetensors"
    return ExportedFile(
        format=file_format,
        input=TensorDescription(
            name=INPUT_NAME,
            dtype="uint8" if is_program else "float32",
            shape=("batch", image.channels, image.size, image.size),
        ),
        output=TensorDescription(
            name=OUTPUT_NAME if is_program else "logits", dtype="float32", shape=("batch", len(description.classes))
        ),
        sha256=sha256,
        proof=proof,
    )


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values of the weights."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_epoch(checkpoint: TrainedCheckpoint, history: History) -> EpochEvent | None:
    """Return the epoch at whose end the checkpoint was saved, None for a checkpoint saved within an epoch."""
    return next((epoch for epoch in history.epochs if epoch.step == checkpoint.step), None)
