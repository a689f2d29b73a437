"""Describe the dataset of a config before training: classes, image files, and a contact sheet of the model's input.

Called by `gputrain data`. The images pass through the pipeline of a run, `engine.train.data.stream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from engine.base.errors import UsageError
from engine.base.text import printable
from engine.config.data_sections import AugmentConfig
from engine.config.schema import Config
from engine.train.data.augment.augmentation import apply_batch_params
from engine.train.data.augment.mixup import build_mixer
from engine.train.data.batch import BatchDataset, load_checked
from engine.train.data.checks import ImageFiles, class_counts, examine_files
from engine.train.data.sampler import PARTS, BatchRequest, Indices, Part
from engine.train.data.sources.base import EncodedSource, ImageFormat, ImageSource, Labels
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.models.pretrained_input import fill_input_keys

# Headers of image files to read for the table of sizes.
MAX_HEADERS = 1000
MAX_SHEET_CLASSES = 30
# Side of a tile in pixels: smaller images are enlarged by a whole factor, larger ones reduced.
MIN_TILE, MAX_TILE = 64, 160
GAP, LABEL_COLUMN, LABEL_CHARACTERS, LABEL_SIZE = 4, 150, 16, 14
# Images of a class.
SHEET_COLUMNS = 8
# The epoch whose random augmentation is shown; epochs of training begin with 1.
SHOWN_EPOCH = 1


@dataclass(frozen=True)
class Dataset:
    """The dataset of a config. `counts` are the images of each class or label and part; of numbers, those of the part.

    `files` is None without image files."""

    config: Config
    source: ImageSource
    image_format: ImageFormat
    counts: dict[Part, list[int]]
    files: ImageFiles | None

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        data, columns = self.config.data, zip(*self.counts.values(), strict=True)
        return {
            "dataset": data.dataset,
            "path": data.path,
            "images": {part: self.source.num_images(part) for part in self.counts},
            "classes": [
                {"name": name, **dict(zip(self.counts, numbers, strict=True)), **span}
                for name, numbers, span in zip(self.source.classes, columns, self.spans(), strict=True)
            ],
            "files": None if self.files is None else asdict(self.files),
            "input": asdict(self.image_format),
            "skipped": list(self.source.skipped),
        }

    def spans(self) -> list[dict[str, float]]:
        """Return the range and mean of each number in the training images; nothing for each class or label."""
        labels = self.source.get_labels("train")
        if labels.dtype.kind != "f":
            return [{} for _ in self.source.classes]
        return [
            {"min": float(column.min()), "mean": float(column.mean()), "max": float(column.max())}
            for column in labels.astype(np.float64).T
        ]


def open_dataset(config: Config) -> Dataset:
    """Open the dataset of a config as a run does. Raises UsageError."""
    config, _ = fill_input_keys(config)
    source = open_source(config)
    parts: tuple[Part, ...] = (*PARTS, "test") if source.num_images("test") else PARTS
    counts = {part: class_counts(source, part).tolist() for part in parts}
    if not any(counts.values()):
        counts = {part: [source.num_images(part)] * len(source.classes) for part in parts}
    files = examine_files(source, MAX_HEADERS) if isinstance(source, EncodedSource) else None
    return Dataset(config, source, model_input_format(config, source), counts, files)


def contact_sheet(dataset: Dataset, *, augmented: bool) -> Image.Image:
    """Return a picture with training images of each class, at most `MAX_SHEET_CLASSES`, as the network sees them.

    The images are those of the model's input before normalization. With `augmented`, they pass through the augmentation
    of the config, mixup and CutMix among it; otherwise they are preprocessed as in an evaluation. Raises UsageError if
    the dataset has no images, or if user code fails.
    """
    if dataset.image_format.is_float:
        raise UsageError.one(
            "data.dataset", "its items are floating-point tensors, which have no picture", code="not-supported"
        )
    labels = dataset.source.get_labels("train")
    classes = [label for label in range(len(dataset.source.classes)) if dataset.counts["train"][label]]
    rows = [_sheet_row(labels, label) for label in classes[:MAX_SHEET_CLASSES]]
    if not rows:
        raise UsageError.one("data.dataset", "it has no training images", code="no-images")
    # The user's transform is imported only where it is applied, and where the caller has checked who named it.
    augment = dataset.config.augment if augmented else AugmentConfig()
    data = dataset.config.data.model_copy(update={"on_bad": "skip"})
    config = dataset.config.model_copy(update={"augment": augment, "data": data})
    epoch = SHOWN_EPOCH if augmented else 0
    pictures = [_load(dataset, config, BatchRequest("train", epoch, indices), row) for row, indices in enumerate(rows)]
    names = [dataset.source.classes[label] for label in classes[:MAX_SHEET_CLASSES]]
    return _draw_sheet(names, pictures)


def _sheet_row(labels: Labels, label: int) -> Indices:
    """Return the first images of a class or label, or images from the smallest to the largest number."""
    if labels.dtype.kind == "f":
        ranks = np.linspace(0, len(labels) - 1, min(len(labels), SHEET_COLUMNS)).round().astype(np.int64)
        return np.argsort(labels[:, label], kind="stable")[ranks]
    return np.flatnonzero(labels == label if labels.ndim == 1 else labels[:, label])[:SHEET_COLUMNS]


def _load(dataset: Dataset, config: Config, request: BatchRequest, row: int) -> Tensor:
    """Return the images of a request as the network sees them, N x C x H x W uint8. Raises UsageError."""
    batch = load_checked(BatchDataset(dataset.source, config, dataset.image_format), request)
    images = batch.images
    if batch.augment_params is not None:
        images = apply_batch_params(images, batch.augment_params)
        if (mixer := build_mixer(config, len(dataset.source.classes))) is not None:
            labels = torch.from_numpy(batch.labels)
            images = mixer(images.float(), labels, SHOWN_EPOCH, row, 0)[0].round().to(torch.uint8)
    return images


def _draw_sheet(names: Sequence[str], classes: Sequence[Tensor]) -> Image.Image:
    """Draw the images of each class in a row behind its name."""
    side = classes[0].shape[-1]
    tile = min(side * max(-(-MIN_TILE // side), 1), MAX_TILE)
    resampling = Image.Resampling.NEAREST if tile > side else Image.Resampling.LANCZOS
    columns = max(map(len, classes))
    sheet = Image.new("RGB", (LABEL_COLUMN + columns * (tile + GAP), len(classes) * (tile + GAP) + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (name, images) in enumerate(zip(names, classes, strict=True)):
        top = row * (tile + GAP) + GAP
        label, font = printable(name)[:LABEL_CHARACTERS], ImageFont.load_default(LABEL_SIZE)
        draw.text((GAP, top + tile // 2), label, "black", font, anchor="lm")
        for number, image in enumerate(images):
            pixels = image.permute(1, 2, 0).numpy()
            picture = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
            sheet.paste(picture.resize((tile, tile), resampling), (LABEL_COLUMN + number * (tile + GAP), top))
    return sheet
