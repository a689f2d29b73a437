"""A source made of the user's own dataset: `build(part)`, called with "train" and "val", gives a map-style dataset of
pairs of an image and a label."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image

from engine.config.data_sections import Data
from engine.config.user_code import in_words, kind_of, load_own
from engine.data.rng import own_draws
from engine.data.sampler import PARTS, Indices, Part
from engine.data.sources.base import Crop, ImageFormat, Images, Labels, UnreadableImageError
from engine.data.sources.folder import COLOUR, GREY
from engine.data.sources.image import to_format
from engine.utils.errors import UsageError

KEY = "data.dataset"
IMAGE_KINDS = "a PIL image, a NumPy array of uint8 (H x W or H x W x C) or a tensor of uint8 (C x H x W)"


@dataclass(frozen=True)
class OwnDataset:
    """Where a dataset comes from. It is made once in each process that asks for it, or was forked from one that did;
    whatever it draws at random for that, it draws alike in all of them."""

    name: str
    code: str | None
    path: str | None
    seed: int

    def part(self, part: Part) -> Any:
        """Raises UsageError."""
        return _made(self, part)

    def called(self, part: Part) -> str:
        return f"{self.name}({part!r})"

    def item(self, part: Part, index: int) -> tuple[Image.Image, int]:
        """Image and label. Raises UnreadableImageError."""
        item_name = f"item {index} of {self.called(part)}"
        dataset = self.part(part)
        try:
            item = dataset[index]
        except Exception as error:
            raise UnreadableImageError(f"{item_name} cannot be read: {in_words(error)}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UnreadableImageError(f"{item_name} is {kind_of(item)}, and must be a pair of an image and a label")
        image, label = item
        try:
            number = operator.index(label)
        except TypeError as error:
            raise UnreadableImageError(
                f"{item_name} has {kind_of(label)} for its label, which must be a whole number"
            ) from error
        return _picture(image, item_name), number


@dataclass(frozen=True)
class OwnSource:
    """Holds where the dataset comes from, and not the dataset."""

    dataset: OwnDataset
    format: ImageFormat
    classes: tuple[str, ...]
    counts: dict[Part, int]
    in_memory: bool = field(default=False, init=False)
    skipped: tuple[str, ...] = field(default=(), init=False)

    def count(self, part: Part) -> int:
        return self.counts[part]

    def labels_of(self, part: Part) -> Labels:
        """Raises UsageError."""
        return _labels(self.dataset, part)

    def load(self, part: Part, indices: Indices, crop: Crop | None = None) -> tuple[Images, Labels]:
        images = np.empty((len(indices), self.format.channels, self.format.size, self.format.size), np.uint8)
        labels = np.empty(len(indices), np.int64)
        for row, index in enumerate(indices):
            image, label = self.dataset.item(part, int(index))
            item_name = f"item {index} of {self.dataset.called(part)}"
            if not 0 <= label < len(self.classes):
                raise UnreadableImageError(
                    f"{item_name} has the label {label}, and there are {len(self.classes)} classes"
                )
            try:
                images[row] = to_format(image, self.format, partial(crop.box, int(index)) if crop else None)
            except Exception as error:
                # Pillow decodes a file when its pixels are first asked for.
                raise UnreadableImageError(f"{item_name} cannot be used: {error}") from error
            labels[row] = label
        return images, labels


def open_own(data: Data, code: str | None, seed: int) -> OwnSource:
    """Raises UsageError where the user's code fails, or gives what cannot be trained on."""
    dataset = OwnDataset(data.dataset, code, data.path, seed)
    counts: dict[Part, int] = {part: _length(dataset, part) for part in PARTS}
    try:
        with own_draws():
            first, _ = dataset.item("train", 0)
            dataset.item("val", 0)
    except UnreadableImageError as error:
        raise UsageError.one(KEY, str(error)) from error
    if data.image_size is None and first.width != first.height:
        raise UsageError.one(
            "data.image_size",
            f"the first image of {dataset.called('train')} is {first.width} x {first.height}; "
            "give the height and width that images are to be brought to, such as 224",
        )
    channels = data.channels or (1 if first.mode in ("1", "L", "LA", "La") or first.mode.startswith("I") else 3)
    mean, std = COLOUR if channels == 3 else GREY
    image_format = ImageFormat(data.image_size or first.width, channels, mean, std)
    classes = _classes(dataset, data.num_classes)
    for part in counts:
        if _listed_labels(dataset, part) is not None and (most := int(_labels(dataset, part).max())) >= len(classes):
            raise UsageError.one(
                KEY, f"{dataset.called(part)} has the label {most}, and there are {len(classes)} classes, from 0"
            )
    return OwnSource(dataset, image_format, classes, counts)


@cache
def _made(dataset: OwnDataset, part: Part) -> Any:
    build = load_own(KEY, dataset.name, dataset.code)
    if not callable(build):
        raise UsageError.one(
            KEY, f'{dataset.name} is {kind_of(build)}; it must be a function or a class, called with "train" and "val"'
        )
    given: dict[str, str] = {}
    try:
        path = inspect.signature(build).parameters.get("path")
    except (TypeError, ValueError):
        path = None
    if path is not None and dataset.path is not None:
        given = {"path": dataset.path}
    elif path is not None and path.default is inspect.Parameter.empty:
        raise UsageError.one("data.path", f"{dataset.name} takes the path of the data: give data.path (--data-path)")
    try:
        with own_draws() as seeded:
            seeded(dataset.seed)
            return build(part, **given)
    except Exception as error:
        raise UsageError.one(KEY, f"{dataset.called(part)} failed: {in_words(error)}") from error


def _length(dataset: OwnDataset, part: Part) -> int:
    made = dataset.part(part)
    if not hasattr(type(made), "__getitem__") or not hasattr(type(made), "__len__"):
        raise UsageError.one(
            KEY, f"{dataset.called(part)} gives {kind_of(made)}; it must give a dataset with len() and [index]"
        )
    try:
        length = len(made)
    except Exception as error:
        raise UsageError.one(KEY, f"the length of {dataset.called(part)} failed: {in_words(error)}") from error
    if length == 0:
        raise UsageError.one(KEY, f"{dataset.called(part)} holds no image")
    return length


def _classes(dataset: OwnDataset, number: int | None) -> tuple[str, ...]:
    """As the training part names them, or else numbered: as many as the config says, or as its labels need."""
    names = getattr(dataset.part("train"), "classes", None)
    if names is None:
        number = number or int(_labels(dataset, "train").max()) + 1
        names = range(number)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UsageError.one(
            KEY, f"the classes of {dataset.called('train')} are {kind_of(names)}, and must be a list of names"
        )
    if len(names) < 2:
        raise UsageError.one(KEY, f"{dataset.called('train')} has fewer than two classes")
    return tuple(str(name) for name in names)


def _listed_labels(dataset: OwnDataset, part: Part) -> Any:
    """The dataset's attribute `targets` or `labels`; None where it has neither."""
    found = (getattr(dataset.part(part), name, None) for name in ("targets", "labels"))
    return next((labels for labels in found if labels is not None), None)


@cache
def _labels(dataset: OwnDataset, part: Part) -> Labels:
    """Those that the dataset lists, or else read from all of its items. Raises UsageError."""
    given, count = _listed_labels(dataset, part), len(dataset.part(part))
    try:
        if given is None:
            with own_draws():
                given = [dataset.item(part, index)[1] for index in range(count)]
        labels = np.asarray(given)
    except UnreadableImageError as error:
        raise UsageError.one(KEY, str(error)) from error
    except Exception as error:
        raise UsageError.one(KEY, f"the labels of {dataset.called(part)} cannot be read: {in_words(error)}") from error
    if labels.dtype.kind not in "iu" or labels.shape != (count,) or labels.min() < 0:
        raise UsageError.one(
            KEY, f"the labels of {dataset.called(part)} must be {count} whole numbers from 0 up, one for each item"
        )
    return labels.astype(np.int64)


def _picture(image: Any, item_name: str) -> Image.Image:
    """Raises UnreadableImageError."""
    if isinstance(image, Image.Image):
        return image
    torch, array = sys.modules.get("torch"), image
    if torch is not None and isinstance(image, torch.Tensor) and image.ndim == 3:
        array = image.detach().cpu().numpy().transpose(1, 2, 0)
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise UnreadableImageError(f"{item_name} has {kind_of(image)} for its image, which must be {IMAGE_KINDS}")
    if array.shape[2:] not in ((), (1,), (3,), (4,)):
        raise UnreadableImageError(f"{item_name} has an image of {array.shape[2]} channels, which must be 1, 3 or 4")
    return Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array))
