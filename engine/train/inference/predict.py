"""Predictions for image files with a trained model. Called by `gputrain predict`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from engine.base.errors import Problem
from engine.base.threads import map_in_threads
from engine.train.data.sources.base import ImageFormat, Images, UnreadableImageError
from engine.train.data.sources.folder_layout import walk_files
from engine.train.data.sources.image import UnusableImageError, read_image
from engine.train.inference.trained_model import TrainedModel

BATCH_SIZE = 64


@dataclass(frozen=True)
class InputFile:
    """A file to classify. `explicit` is True if it was named itself, False if it was found in a folder."""

    path: Path
    explicit: bool


@dataclass(frozen=True)
class Prediction:
    """What an image gets, as names with their values, or the error if it could not be read: the top-k classes or the
    labels with their probabilities, most likely first, or all numbers.

    The reason of the error follows the path of the file in a sentence."""

    file: InputFile
    classes: tuple[tuple[str, float], ...] = ()
    error: Problem | None = None


def find_input_files(paths: Sequence[Path]) -> Iterator[InputFile]:
    """Yield the given files, and the files in the given folders: recursive, sorted by name, without hidden files."""
    for path in paths:
        if path.is_dir():
            yield from (InputFile(file, explicit=False) for file in sorted(walk_files(path)))
        else:
            yield InputFile(path, explicit=True)


def predict(model: TrainedModel, files: Sequence[InputFile], top_k: int) -> Iterator[Prediction]:
    """Predict image files in batches of BATCH_SIZE. Yields one prediction per file, in order."""
    image_format, names = model.checkpoint.image_format, model.checkpoint.classes
    read = partial(read_image_or_error, image_format=image_format)
    results = map_in_threads(read, (file.path for file in files), min(8, os.cpu_count() or 1))
    remaining = zip(files, results, strict=True)
    while batch := list(islice(remaining, BATCH_SIZE)):
        images = [result for _, result in batch if not isinstance(result, Problem)]
        outputs = model.probabilities(torch.from_numpy(np.stack(images))) if images else None
        predictions = iter(() if outputs is None else model.task.predict(outputs, top_k))
        for file, result in batch:
            if isinstance(result, Problem):
                yield Prediction(file, error=result)
            else:
                yield Prediction(file, tuple((names[index], value) for index, value in next(predictions)))


def read_image_or_error(path: Path, image_format: ImageFormat) -> Images | Problem:
    """Return the decoded and resized image, or the reason why it cannot be read."""
    try:
        return read_image(path, image_format)
    except UnreadableImageError as error:
        cause = error.__cause__
        if isinstance(cause, UnusableImageError):
            return Problem("", f"is {cause}", code=cause.code)
        code = "not-found" if isinstance(cause, FileNotFoundError) else "bad-image"
        return Problem("", f"cannot be read: {getattr(cause, 'strerror', None) or cause}", code=code)
