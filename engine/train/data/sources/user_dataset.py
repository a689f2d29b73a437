"""Wrap a user dataset (`data.dataset=module:name`) as an image source.

The named function or class is called with "train" and with "val", and returns a map-style dataset of (image, label)
pairs.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engine.base.errors import UsageError
from engine.config.data_sections import DataConfig
from engine.config.run_sections import RunConfig
from engine.config.user_code import describe_value, load_user_code, user_failures
from engine.config.user_errors import describe_exception
from engine.train.data.augment.augmentation import fork_rngs
from engine.train.data.sampler import PARTS, Part
from engine.train.data.sources.base import (
    Fingerprint,
    ImageFormat,
    Images,
    ItemFormat,
    ItemSource,
    Labels,
    UnreadableImageError,
)
from engine.train.data.sources.folder import IMAGENET_GRAY_STATS, IMAGENET_RGB_STATS
from engine.train.data.sources.formats import Preprocessing, format_from_config
from engine.train.data.sources.image import natural_mode, picture_to_input

DATASET_KEY = "data.dataset"
SUPPORTED_IMAGE_TYPES = (
    "a PIL image, a uint8 NumPy array (H x W or H x W x C), a uint8 tensor or a floating-point tensor (C x H x W)"
)
# A floating-point item, C x H x W float32.
FloatImage = NDArray[np.float32]


@dataclass(frozen=True)
class UserDataset:
    """Reference to a user dataset, which `build_dataset` creates once per process.

    Random numbers drawn while it is created are the same in every process.
    """

    name: str
    code: str | None
    packages: tuple[str, ...]
    path: str | None
    seed: int

    def describe(self, part: Part) -> str:
        return f"{self.name}({part!r})"

    def item(self, part: Part, index: int) -> tuple[Image.Image | FloatImage, int]:
        """Return image and label of an item; the image is an array if it is a floating-point tensor.

        Raises UnreadableImageError if the item fails or has an unsupported type.
        """
        item_name = f"item {index} of {self.describe(part)}"
        dataset = build_dataset(self, part)
        try:
            item = dataset[index]
        except Exception as error:
            reason = describe_exception(error, self.code, self.packages)
            raise UnreadableImageError(f"{item_name} cannot be read: {reason}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UnreadableImageError(f"{item_name} is {describe_value(item)}; it must be an (image, label) pair")
        image, label = item
        try:
            class_index = operator.index(label)
        except TypeError as error:
            raise UnreadableImageError(
                f"{item_name} has {describe_value(label)} as its label; it must be an integer"
            ) from error
        return _to_image(image, item_name), class_index


@dataclass(frozen=True)
class UserDatasetSource(ItemSource):
    """Image source of a user dataset. Holds a reference to the dataset, so that it pickles without the data."""

    dataset: UserDataset
    format: ImageFormat
    classes: tuple[str, ...]
    counts: dict[Part, int]

    def num_images(self, part: Part) -> int:
        return self.counts.get(part, 0)

    def get_labels(self, part: Part) -> Labels:
        """Raises UsageError."""
        return _all_labels(self.dataset, part)

    def fingerprint(self, part: Part) -> Fingerprint:
        """Return the fingerprint of the labels, empty unless the dataset lists them. Raises UsageError."""
        return Fingerprint() if _labels_attribute(self.dataset, part) is None else super().fingerprint(part)

    def load_into(self, pixels: Images, part: Part, index: int, preprocessing: Preprocessing) -> int:
        image, label = self.dataset.item(part, index)
        item_name = f"item {index} of {self.dataset.describe(part)}"
        if not 0 <= label < len(self.classes):
            raise UnreadableImageError(f"{item_name} has {_label_out_of_range(label, len(self.classes))}")
        try:
            pixels[:] = self._to_format(image, preprocessing, index)
        except Exception as error:
            # Pillow decodes lazily: a damaged file fails here.
            raise UnreadableImageError(f"{item_name} cannot be used: {error}") from error
        return label

    def _to_format(self, image: Image.Image | FloatImage, preprocessing: Preprocessing, index: int) -> Images:
        """Return an image in the source's format. Raises ValueError if that is not possible."""
        if isinstance(image, Image.Image) == self.format.is_float:
            kinds = (
                ("floating-point tensors", "images") if self.format.is_float else ("images", "floating-point tensors")
            )
            raise ValueError(f"the first item has {kinds[0]}, this one has {kinds[1]}")
        if isinstance(image, Image.Image):
            return picture_to_input(image, self.format.channels, preprocessing, index)
        expected = (self.format.channels, self.format.size, self.format.size)
        if image.shape != expected:
            raise ValueError(f"its shape is {_format_shape(image.shape)} instead of {_format_shape(expected)}")
        return image


def first_item_format(data: DataConfig, run: RunConfig) -> ItemFormat:
    """Return the format of the first training item. Raises UsageError if the code fails or the item is unsupported."""
    first = _first_item(UserDataset(data.dataset, run.code, run.code_packages, data.path, run.seed), "train")
    if not isinstance(first, Image.Image):
        channels, height, width = first.shape
        return ItemFormat(width if width == height else None, channels, is_float=True)
    return ItemFormat(first.width if first.width == first.height else None, 1 if natural_mode(first) == "L" else 3)


def open_user_dataset(data: DataConfig, run: RunConfig) -> UserDatasetSource:
    """Open a user dataset and check its first items. Raises UsageError if the code fails or the data is unsupported."""
    dataset = UserDataset(data.dataset, run.code, run.code_packages, data.path, run.seed)
    counts: dict[Part, int] = {part: _length(dataset, part) for part in PARTS}
    first, _ = [_first_item(dataset, part) for part in PARTS]
    image_format = _item_format(data, dataset, first)
    classes = _class_names(dataset, data.num_classes)
    for part in counts:
        if _labels_attribute(dataset, part) is not None:
            max_label = int(_all_labels(dataset, part).max())
            if max_label >= len(classes):
                raise UsageError.one(
                    DATASET_KEY,
                    f"{dataset.describe(part)} has {_label_out_of_range(max_label, len(classes))}",
                    code="bad-label",
                )
    return UserDatasetSource(dataset, image_format, classes, counts)


def _reported(dataset: UserDataset, what: str) -> AbstractContextManager[None]:
    """Raise what the user's code raises as a UsageError, which begins with `what`."""
    return user_failures(DATASET_KEY, what, dataset.code, dataset.packages)


def _first_item(dataset: UserDataset, part: Part) -> Image.Image | FloatImage:
    with _reported(dataset, f"{dataset.describe(part)} failed"), fork_rngs():
        return dataset.item(part, 0)[0]


def _item_format(data: DataConfig, dataset: UserDataset, first: Image.Image | FloatImage) -> ImageFormat:
    """Return the format of a dataset from its first item. Raises UsageError."""
    train = dataset.describe("train")
    if not isinstance(first, Image.Image):
        channels, height, width = first.shape
        if height != width:
            raise UsageError.one(
                DATASET_KEY,
                f"the first tensor of {train} is {_format_shape(first.shape)}, not square",
                "pad or resize the tensors in the dataset",
                code="bad-image",
            )
        return ImageFormat(width, channels, (0.0,) * channels, (1.0,) * channels, dtype="float32")
    if data.max_train_size is None and first.width != first.height:
        raise UsageError.one(
            "data.image_size",
            f"the first image of {train} is {first.width} x {first.height}, not square",
            "set data.image_size, such as 224",
            code="missing-value",
        )
    channels = data.channels or (1 if natural_mode(first) == "L" else 3)
    mean, std = IMAGENET_RGB_STATS if channels == 3 else IMAGENET_GRAY_STATS
    return format_from_config(data, ImageFormat(first.width, channels, mean, std))


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


@cache
def build_dataset(dataset: UserDataset, part: Part) -> Any:
    """Return the dataset of a part, created on the first call. Raises UsageError."""
    build = load_user_code(DATASET_KEY, dataset.name, dataset.code, dataset.packages)
    kwargs: dict[str, str] = {}
    path = None
    # Built-in callables may have no signature.
    with suppress(TypeError, ValueError):
        path = inspect.signature(build).parameters.get("path")
    if path is not None and dataset.path is not None:
        kwargs = {"path": dataset.path}
    elif path is not None and path.default is inspect.Parameter.empty:
        raise UsageError.one(
            "data.path",
            f"{dataset.name} requires the argument path",
            "set data.path (--data-path)",
            code="missing-value",
        )
    with _reported(dataset, f"{dataset.describe(part)} failed"), fork_rngs() as seed_rng:
        seed_rng(dataset.seed)
        return build(part, **kwargs)


def _length(dataset: UserDataset, part: Part) -> int:
    built, name = build_dataset(dataset, part), dataset.describe(part)
    if not hasattr(type(built), "__getitem__") or not hasattr(type(built), "__len__"):
        raise UsageError.one(
            DATASET_KEY,
            f"{name} returned {describe_value(built)}; it must return a dataset with __getitem__ and __len__",
            code="invalid-value",
        )
    with _reported(dataset, f"len() of {name} failed"):
        length = len(built)
    if length == 0:
        raise UsageError.one(DATASET_KEY, f"{name} is empty", code="no-images")
    return length


def _class_names(dataset: UserDataset, num_classes: int | None) -> tuple[str, ...]:
    """Return the `classes` of the training dataset, else numbers up to `num_classes` or the largest label."""
    names = getattr(build_dataset(dataset, "train"), "classes", None)
    if names is None:
        num_classes = num_classes or int(_all_labels(dataset, "train").max()) + 1
        names = range(num_classes)
    train = dataset.describe("train")
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UsageError.one(
            DATASET_KEY,
            f"the classes of {train} are {describe_value(names)}; they must be a list of names",
            code="invalid-value",
        )
    return tuple(str(name) for name in names)


def _labels_attribute(dataset: UserDataset, part: Part) -> Any:
    """Return the dataset's attribute `targets` or `labels`; None if it has neither."""
    candidates = (getattr(build_dataset(dataset, part), name, None) for name in ("targets", "labels"))
    return next((labels for labels in candidates if labels is not None), None)


@cache
def _all_labels(dataset: UserDataset, part: Part) -> Labels:
    """Return the labels that the dataset lists, or read them from all its items; N int64. Raises UsageError."""
    raw_labels, count = _labels_attribute(dataset, part), len(build_dataset(dataset, part))
    labels_of = f"the labels of {dataset.describe(part)}"
    with _reported(dataset, f"{labels_of} cannot be read"):
        if raw_labels is None:
            with fork_rngs():
                raw_labels = [dataset.item(part, index)[1] for index in range(count)]
        labels = np.asarray(raw_labels)
    if labels.dtype.kind not in "iu" or labels.shape != (count,) or labels.min() < 0:
        raise UsageError.one(
            DATASET_KEY, f"{labels_of} must be {count} non-negative integers, one per item", code="bad-label"
        )
    return labels.astype(np.int64)


def _label_out_of_range(label: int, num_classes: int) -> str:
    return f"label {label}, but the labels of {num_classes} classes are 0 to {num_classes - 1}"


def _to_image(image: Any, item_name: str) -> Image.Image | FloatImage:
    """Convert an image of a supported type to Pillow, a floating-point tensor to float32.

    Raises UnreadableImageError for any other type.
    """
    if isinstance(image, Image.Image):
        return image
    torch, array = sys.modules.get("torch"), image
    if torch is not None and isinstance(image, torch.Tensor) and image.ndim == 3:
        if image.is_floating_point():
            return np.asarray(image.detach().cpu().float().numpy(), np.float32)
        array = image.detach().cpu().numpy().transpose(1, 2, 0)
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise UnreadableImageError(
            f"{item_name} has {describe_value(image)} as its image; it must be {SUPPORTED_IMAGE_TYPES}",
        )
    if array.shape[2:] not in ((), (1,), (3,), (4,)):
        raise UnreadableImageError(
            f"{item_name} has a uint8 image with {array.shape[2]} channels; it must have 1, 3 or 4, or be a "
            "floating-point tensor",
        )
    return Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array))
