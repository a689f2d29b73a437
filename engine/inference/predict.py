"""Images that nobody has labelled, and what a trained model takes them for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import UnidentifiedImageError

from engine.data.sources.base import ImageFormat, Images, UnreadableImageError
from engine.data.sources.folder import files_below
from engine.data.sources.image import read_image
from engine.inference.trained_model import Trained
from engine.utils.files import is_file

BATCH_IMAGES = 64


@dataclass(frozen=True)
class Given:
    """A file to be looked at; `named` says that it was asked for itself, and not found in a folder."""

    path: Path
    named: bool


@dataclass(frozen=True)
class Answer:
    """The likeliest classes of an image, the first one first; or why it could not be read."""

    given: Given
    classes: tuple[tuple[str, float], ...] = ()
    fault: str | None = None


def files_in(paths: Sequence[Path]) -> Iterator[Given]:
    """The files that these stand for: those in a folder at any depth, in the order of their names, without hidden
    ones."""
    for path in paths:
        if path.is_dir():
            yield from (Given(file, named=False) for file in sorted(files_below(path)))
        else:
            yield Given(path, named=True)


def predict(trained: Trained, files: Sequence[Given], top: int) -> Iterator[Answer]:
    """An answer for each file, in their order, a batch at a time."""
    image_format, names = trained.saved.image_format, trained.saved.classes
    waiting = iter(files)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        while batch := list(islice(waiting, BATCH_IMAGES)):
            read = list(pool.map(lambda given: _read(given.path, image_format), batch))
            images = [one for one in read if not isinstance(one, str)]
            found = iter(_likeliest(trained, images, top) if images else ())
            for given, one in zip(batch, read, strict=True):
                if isinstance(one, str):
                    yield Answer(given, fault=one)
                else:
                    yield Answer(given, tuple((names[index], share) for index, share in next(found)))


def _read(path: Path, image_format: ImageFormat) -> Images | str:
    """The image, or why it cannot be read."""
    if not is_file(path):
        return "is not a file" if path.exists() else "does not exist"
    try:
        return read_image(path, image_format)
    except UnreadableImageError as error:
        cause = error.__cause__
        if isinstance(cause, UnidentifiedImageError):
            return "is not an image"
        return f"cannot be read: {getattr(cause, 'strerror', None) or cause}"


def _likeliest(trained: Trained, images: Sequence[Images], top: int) -> list[list[tuple[int, float]]]:
    """For each image the numbers of its likeliest classes with their probabilities."""
    probabilities = trained.probabilities(torch.from_numpy(np.stack(images)))
    best = probabilities.topk(min(top, probabilities.shape[1]), 1)
    return [
        list(zip(indices, values, strict=True))
        for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def as_number(probability: float) -> float | None:
    """JSON has no NaN, which is what a model gives whose weights are not finite."""
    return probability if math.isfinite(probability) else None
