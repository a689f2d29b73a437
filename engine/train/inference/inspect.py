"""Evaluation of single images, for the lists of `engine.runs.inspection`. Called by `gputrain evaluate --list`.

`engine.train.inference.evaluate` evaluates; this module collects the result of each image and small pictures of the
worst.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from engine.config.schema import Config
from engine.runs.folder import RunFolder
from engine.runs.inspection import (
    MAX_IMAGES,
    MAX_THUMBNAIL_BYTES,
    MAX_THUMBNAIL_SIDE,
    MAX_UNREAD,
    PART_NAMES,
    Inspection,
    InspectionInfo,
)
from engine.train.data.batch import BatchDataset
from engine.train.data.sampler import PARTS, BatchRequest, Indices, Part
from engine.train.data.sources.base import EncodedSource, ImageFormat, ImageSource
from engine.train.data.sources.folder import FolderSource
from engine.train.inference.evaluate import evaluate_checkpoint, expand_parts
from engine.train.inference.stored_inspection import InspectionRequest
from engine.train.inference.trained_model import TrainedCheckpoint, find_epoch
from engine.train.loop.tasks.base import Task

THUMBNAIL_BATCH = 256
Prediction = list[tuple[int, float]]
"""What `Task.predict` returns of an image."""


def inspect_checkpoint(
    run: RunFolder, checkpoint: TrainedCheckpoint, request: InspectionRequest, device: str = "auto"
) -> Inspection:
    """Evaluate a checkpoint once on every image of a part, and return the result of each image.

    Raises UsageError as `evaluate_checkpoint` does, and for more than MAX_IMAGES images.
    """
    columns: dict[str, list[NDArray[np.generic]]] = {}
    collect = partial(_collect, columns)
    result = evaluate_checkpoint(checkpoint, request.overrides, request.part, device, collect, MAX_IMAGES)
    source, epoch = result.source, find_epoch(checkpoint, run.history())
    root = os.path.realpath(source.root) if isinstance(source, FolderSource) else None
    info = InspectionInfo(
        checkpoint=checkpoint.path.name,
        digest=request.digest,
        step=checkpoint.step,
        epoch=None if epoch is None else epoch.epoch,
        raw=request.raw,
        part=request.part,
        dataset=result.config.data.dataset,
        classes=checkpoint.classes,
        root=root,
        overrides=request.overrides,
        data=result.config.data.model_dump(mode="json"),
        seed=result.config.run.seed,
        fingerprints={part: asdict(source.fingerprint(part)) for part in expand_parts(request.part)},
        unread=result.unread[:MAX_UNREAD],
        unread_count=len(result.unread),
        time=time.time(),
    )
    whole, paths = {name: np.concatenate(arrays) for name, arrays in columns.items()}, None
    if isinstance(source, EncodedSource):
        by_part = [source.image_names(part) for part in PARTS]
        paths = [by_part[part][index] for part, index in zip(whole["part"], whole["index"], strict=True)]
    inspection = Inspection(info, whole, paths)
    return inspection if root is not None else _with_thumbnails(inspection, source, result.config, result.image_format)


@dataclass(frozen=True)
class WorstImage:
    """An image with a great loss: what the model predicts and what is true, as names with their values."""

    name: str
    loss: float
    predicted: tuple[tuple[str, float], ...]
    true: tuple[tuple[str, float], ...]


def find_worst_images(
    checkpoint: TrainedCheckpoint, request: InspectionRequest, device: str, count: int
) -> list[WorstImage]:
    """Evaluate a checkpoint, and return the images with the greatest losses. Raises UsageError as `evaluate_checkpoint`
    does.

    For a task without classes, whose images have labels or numbers; a loss is that of the scaled numbers.
    """
    found: list[tuple[float, Part, int, Prediction, Prediction]] = []

    def collect(part: Part, indices: Indices, logits: Tensor, targets: Tensor, task: Task) -> None:
        outputs, true = task.predict(task.activate(logits), 1), task.predict(targets, 1)
        for row, index in enumerate(indices):
            loss = task.validation_loss(logits[row : row + 1], targets[row : row + 1]).item()
            found.append((loss, part, int(index), outputs[row], true[row]))
        found.sort(key=lambda image: -image[0])
        del found[count:]

    source = evaluate_checkpoint(checkpoint, request.overrides, request.part, device, collect).source
    names = checkpoint.classes
    return [
        WorstImage(
            source.image_names(part)[index] if isinstance(source, EncodedSource) else f"{part} {index}",
            loss,
            tuple((names[number], value) for number, value in outputs),
            tuple((names[number], value) for number, value in true),
        )
        for loss, part, index, outputs, true in found
    ]


def _collect(
    columns: dict[str, list[NDArray[np.generic]]],
    part: Part,
    indices: Indices,
    logits: Tensor,
    targets: Tensor,
    task: Task,
) -> None:
    """Add the results of images to the columns, an `ImageObserver`."""
    probabilities = task.activate(logits)
    best, predicted = probabilities.topk(2, 1), logits.argmax(1)
    # The loss of a model and of a user is a mean over a batch.
    losses = [task.validation_loss(logits[row : row + 1], targets[row : row + 1]) for row in range(len(targets))]
    values = {
        "part": np.full(len(indices), PART_NAMES.index(part), np.uint8),
        "index": np.asarray(indices, np.int64),
        "label": targets,
        # Not the first of `best`: both break ties in their own way, and the confusion matrix uses this one.
        "predicted": predicted,
        "second": torch.where(best.indices[:, 0] == predicted, best.indices[:, 1], best.indices[:, 0]),
        "probability": best.values[:, 0],
        "label_probability": probabilities.gather(1, targets[:, None])[:, 0],
        "margin": best.values[:, 0] - best.values[:, -1],
        "loss": torch.stack(losses).float(),
    }
    for name, column in values.items():
        columns.setdefault(name, []).append(np.asarray(column.cpu() if isinstance(column, Tensor) else column))


def _with_thumbnails(
    inspection: Inspection, source: ImageSource, config: Config, image_format: ImageFormat
) -> Inspection:
    """Return the inspection with pictures of its wrong images, then of the others, both by descending loss, as the
    network sees them. Unreadable images get none."""
    side, channels = min(image_format.val_size, MAX_THUMBNAIL_SIDE), 3 if image_format.channels >= 3 else 1
    columns = inspection.columns
    worst_first = np.lexsort((-columns["loss"], columns["label"] == columns["predicted"]))
    wanted = worst_first[: MAX_THUMBNAIL_BYTES // (side * side * channels)]
    data = config.data.model_copy(update={"on_bad": "skip"})
    dataset = BatchDataset(source, config.model_copy(update={"data": data}), image_format)
    shown: list[NDArray[np.int64]] = []
    pictures: list[NDArray[np.uint8]] = []
    for code, part in enumerate(PARTS):
        of_part = wanted[columns["part"][wanted] == code]
        for start in range(0, len(of_part), THUMBNAIL_BATCH):
            rows = of_part[start : start + THUMBNAIL_BATCH]
            indices = columns["index"][rows]
            batch = dataset[BatchRequest(part, 0, indices)]
            if batch.loss_weight == 0:
                continue
            shown.append(rows if batch.readable is None else rows[np.isin(indices, batch.readable)])
            pictures += [_thumbnail(image, side) for image in batch.images.numpy()]
    if not pictures:
        return inspection
    return replace(inspection, thumbnail_rows=np.concatenate(shown), thumbnails=np.stack(pictures))


def _thumbnail(image: NDArray[np.generic], side: int) -> NDArray[np.uint8]:
    """Return an image of C x H x W as side x side x C. Floating-point values are stretched to the range of uint8."""
    pixels = image[:3] if len(image) >= 3 else image[:1]
    if pixels.dtype != np.uint8:
        values = np.nan_to_num(pixels.astype(np.float64), posinf=0.0, neginf=0.0)
        low, high = values.min(), values.max()
        pixels = ((values - low) * (255 / (high - low or 1))).astype(np.uint8)
    planes = [Image.fromarray(plane).resize((side, side), Image.Resampling.BOX) for plane in pixels]
    return np.stack([np.asarray(plane) for plane in planes], 2)
