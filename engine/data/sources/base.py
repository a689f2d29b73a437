"""The interface of image sources, and the types that they share with augmentation and the input pipelines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.config.data_sections import DataConfig, Fit, Interpolation
from engine.config.rules import val_resize_problem
from engine.data.fingerprint import Fingerprint, hash_integers
from engine.data.sampler import Indices, Part
from engine.utils.codec import Count, Number, Record
from engine.utils.errors import CodedError, Problem, UsageError

# uint8, or float32 for user datasets whose items are floating-point tensors, see `ImageFormat.dtype`.
Images = NDArray[Any]
Labels = NDArray[np.int64]
# Left, top, right and bottom in pixels, as in Pillow's Image.crop.
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Preprocessing:
    """How an image of any size becomes a square of `size` x `size` pixels, for training or for evaluation.

    With `resize`, the shorter edge (`fit` crop) or both edges (squash) become `resize` pixels long, and the center is
    cropped: torchvision's Resize and CenterCrop, and timm's crop modes. Without, the largest center square (crop) or
    the whole image (squash) is resized. `draft` permits to decode a large JPEG at reduced scale.
    """

    size: int
    resize: int | None
    fit: Fit
    interpolation: Interpolation
    draft: bool

    @property
    def resized_size(self) -> int:
        """Side of a square image after the resize, before the center crop."""
        return self.resize or self.size

    def keeps(self, stored_size: int) -> bool:
        """Whether square images of this size stay as they are."""
        return stored_size == self.resized_size == self.size


@dataclass(frozen=True)
class ImageFormat:
    """Preprocessing, channels and normalization of square images.

    `mean` and `std` are per channel, on a scale of 0 to 1. `size` is the side of the input in training, `val_size`
    (default: `size`) in evaluation. `val_resize` is `Preprocessing.resize` of the evaluation. Images of dtype float32
    have any number of channels; they reach the model as the user's dataset returns them. With `epoch_sizes`
    (`DataConfig.epoch_sizes`), the size in training depends on the epoch, and `size` is the largest.
    """

    size: Count
    channels: Count
    mean: tuple[Number, ...]
    std: tuple[Number, ...]
    val_size: Count = 0
    val_resize: Count | None = None
    fit: Fit = "crop"
    interpolation: Interpolation = "bilinear"
    dtype: Literal["uint8", "float32"] = "uint8"
    epoch_sizes: tuple[tuple[Count, Count], ...] = ()

    def __post_init__(self) -> None:
        if self.val_size == 0:
            object.__setattr__(self, "val_size", self.size)

    @classmethod
    def from_checkpoint(cls, saved: Mapping[str, Any]) -> ImageFormat:
        """Return the format that a checkpoint holds."""
        values = {key: saved[key] for key in cls.__dataclass_fields__}
        return cls(**values | {"mean": tuple(saved["mean"]), "std": tuple(saved["std"])})

    @property
    def is_float(self) -> bool:
        return self.dtype == "float32"

    @property
    def bytes_per_value(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def train_sizes(self) -> tuple[int, ...]:
        """The sizes of the training images without repetition, in the order of the epochs."""
        return tuple(dict.fromkeys(size for _, size in self.epoch_sizes)) or (self.size,)

    def at_epoch(self, epoch: int) -> ImageFormat:
        """Return the format with the size of the training images in an epoch, from 1."""
        size = next((size for first, size in reversed(self.epoch_sizes) if first <= epoch), self.size)
        return self if size == self.size else replace(self, size=size)

    def describe(self) -> str:
        """Return sizes and filter of training and evaluation: "train 176, evaluate resize 232 crop 224 bicubic".

        With sizes by epoch: "train 160 to 192 (160@1, 192@13), evaluate 224 bilinear"."""
        train = str(self.size)
        if self.epoch_sizes:
            first, last = self.epoch_sizes[0][1], self.epoch_sizes[-1][1]
            train = f"{first} to {last} ({', '.join(f'{size}@{epoch}' for epoch, size in self.epoch_sizes)})"
        return f"train {train}, evaluate {self.describe_evaluation()}"

    def describe_evaluation(self) -> str:
        size = str(self.val_size) if self.val_resize is None else f"resize {self.val_resize} crop {self.val_size}"
        return f"{size} {self.interpolation}{' squash' if self.fit == 'squash' else ''}"

    def preprocessing(self, *, training: bool) -> Preprocessing:
        """Return the preprocessing of evaluation and prediction, or of training images that no random crop resizes."""
        if training:
            return Preprocessing(self.size, None, self.fit, self.interpolation, draft=True)
        return Preprocessing(self.val_size, self.val_resize, self.fit, self.interpolation, draft=False)


def format_from_config(data: DataConfig, base: ImageFormat) -> ImageFormat:
    """Return the format of a dataset with the sizes, channels and preprocessing that the config sets.

    Raises UsageError if the center crop does not fit into the resized image.
    """
    if base.is_float:
        return base
    size = data.max_train_size or base.size
    image_format = replace(
        base,
        size=size,
        channels=data.channels or base.channels,
        val_size=data.val_crop or data.image_size or size,
        val_resize=data.val_resize,
        fit=data.fit or base.fit,
        interpolation=data.interpolation or base.interpolation,
        epoch_sizes=data.epoch_sizes,
    )
    if problem := val_resize_problem(data.val_resize, image_format.val_size):
        raise UsageError.one("data.val_resize", problem, code="conflict")
    return image_format


@dataclass(frozen=True)
class CropSpec:
    """Preprocessing of training images: `box(index, height, width)` is the box to crop and resize to `size` x `size`.

    Without `box` there is no random crop: sources that decode images apply `ImageFormat.training`, others return the
    stored images.
    """

    size: int
    box: Callable[[int, int, int], Box] | None
    interpolation: Interpolation = "bilinear"


class ItemFormat(Record, frozen=True):
    """What the first item of a user dataset shows: its size if it is square, its channels, and whether it is a
    floating-point tensor."""

    size: Count | None
    channels: Count
    is_float: bool = False


class UnreadableImageError(CodedError):
    """An image cannot be read or decoded. The message names it."""

    code = "bad-image"


class ImageSource(ABC):
    """Labeled images in a training and a validation part, and for some folders in a part of test images.

    A source is cheap to create and to pickle, and creating it does not import torch. `format` has the size and channels
    in which `load` returns images, and their normalization. `classes` are the class names, indexed by label, and
    `labels` those of each part, N int64.
    """

    format: ImageFormat
    classes: tuple[str, ...]
    labels: dict[Part, Labels]
    in_memory = False
    """Whether the images are in memory or generated, so that `load` reads no files."""
    skipped: tuple[str, ...] = ()
    """Unusable files found when the source was opened, each with the reason in parentheses."""
    warnings: tuple[Problem, ...] = ()
    """What of the images may not be meant, such as those of validation among those of training."""

    def num_images(self, part: Part) -> int:
        """Return the number of images of a part."""
        return len(self.labels.get(part, ()))

    def get_labels(self, part: Part) -> Labels:
        """Return the labels of a part, N int64. Raises UsageError if code of the user fails."""
        return self.labels[part]

    def fingerprint(self, part: Part) -> Fingerprint:
        """Return the fingerprint of a part, from what the source knows without reading an image."""
        return Fingerprint(labels=hash_integers(self.get_labels(part)))

    @abstractmethod
    def load(self, part: Part, indices: Indices, crop: CropSpec | None = None) -> tuple[Images, Labels]:
        """Load images, N x C x H x W uint8 in the source's channels, and labels, N int64.

        With `crop`, images are for training: each is cropped at its stored resolution and resized to `crop.size`.
        Without, they are for evaluation, of either part. Sources `in_memory` return stored images, which
        `engine.data.augment.batch_ops.convert_to_format` preprocesses; the others preprocess them. Raises
        UnreadableImageError.
        """
