"""The interface of image sources, and its two kinds: images that are arrays, and encoded image files."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.base.codec import Count, Record
from engine.base.errors import Problem
from engine.train.data.sampler import Indices, Part
from engine.train.data.sources.formats import ImageFormat, Preprocessing
from engine.train.data.sources.image import (
    Images,
    UnreadableImageError,
    crop_images,
    decode_into,
    empty_images,
    named_image,
)

__all__ = ["ImageFormat", "Images", "UnreadableImageError"]

# Targets of images: classes, N int64; several labels, N x C uint8 of 0 and 1; numbers, N x K float32.
Labels = NDArray[np.int64 | np.uint8 | np.float32]
Label = Labels | np.int64 | int


@dataclass(frozen=True)
class Fingerprint:
    """What a resumed run compares with its checkpoint: SHA-256 digests of the file names, labels and file sizes of one
    part, in the order of its images.

    They depend neither on the folder of the dataset nor on rank or input pipeline. A digest is empty if the source does
    not have the property, or only after reading every image.
    """

    names: str = ""
    labels: str = ""
    sizes: str = ""


def hash_names(names: Iterable[str]) -> str:
    """Return the SHA-256 of the names, separated by null bytes, which no file name contains."""
    digest, separator = hashlib.sha256(), ""
    for name in names:
        digest.update(os.fsencode(separator + name))
        separator = "\0"
    return digest.hexdigest()


def hash_numbers(values: NDArray[np.integer | np.floating]) -> str:
    """Return the SHA-256 of integers or of float32 numbers."""
    return hashlib.sha256(values.astype("<f4" if values.dtype.kind == "f" else "<i8").tobytes()).hexdigest()


class ItemFormat(Record, frozen=True):
    """What the first item of a user dataset shows: its size if it is square, its channels, and whether it is a
    floating-point tensor."""

    size: Count | None
    channels: Count
    is_float: bool = False


class ImageSource(ABC):
    """Labeled images in a training and a validation part, and for some datasets in a part of test images.

    A source is cheap to create and to pickle, and creating it does not import torch. `format` has the size and channels
    in which `load` returns images, and their normalization. `classes` are the names of the classes, labels or numbers
    that the model predicts, and `labels` the targets of each part, see `Labels`.
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
        """Return the targets of a part, see `Labels`. Raises UsageError if code of the user fails."""
        return self.labels[part]

    def fingerprint(self, part: Part) -> Fingerprint:
        """Return the fingerprint of a part, from what the source knows without reading an image."""
        return Fingerprint(labels=hash_numbers(self.get_labels(part)))

    def cache_key(self, part: Part) -> str:
        """Return a text that changes with the images of a part, for the key of their decoded cache; "" if they are not
        cached."""
        return ""

    @abstractmethod
    def load(self, part: Part, indices: Indices, preprocessing: Preprocessing | None = None) -> tuple[Images, Labels]:
        """Load images, N x C x H x W uint8 in the source's channels, and their targets, see `Labels`.

        Sources `in_memory` return stored images, cropped and resized only with `Preprocessing.random_box`;
        `engine.train.data.augment.batch_ops.convert_to_format` preprocesses them. The others preprocess each image,
        without `preprocessing` as in an evaluation. Raises UnreadableImageError.
        """


@dataclass(frozen=True)
class ArraySource(ImageSource):
    """Images in memory, one N x C x H x W uint8 array per part, with N int64 labels: digits and torchvision's datasets.

    `stored_key` is the key of the images in the decoded cache, empty if they are not cached. `warning` is for the log.
    """

    format: ImageFormat
    classes: tuple[str, ...]
    images: dict[Part, Images]
    labels: dict[Part, Labels]
    stored_key: str = ""
    warning: Problem | None = None
    in_memory = True

    def cache_key(self, part: Part) -> str:
        return self.stored_key

    def load(self, part: Part, indices: Indices, preprocessing: Preprocessing | None = None) -> tuple[Images, Labels]:
        return crop_images(self.images[part][indices], indices, preprocessing), self.labels[part][indices]


class ItemSource(ImageSource):
    """Base class of sources that load one image after the other."""

    @abstractmethod
    def load_into(self, pixels: Images, part: Part, index: int, preprocessing: Preprocessing) -> Label:
        """Load one image, as `load` says, to its place in a batch; return its target. Raises UnreadableImageError."""

    def load(self, part: Part, indices: Indices, preprocessing: Preprocessing | None = None) -> tuple[Images, Labels]:
        """See `ImageSource.load`."""
        preprocessing, labels = preprocessing or self.format.preprocessing(training=False), list[Label]()
        # With the channels last in memory.
        images = empty_images(
            len(indices), self.format.channels, preprocessing.size, preprocessing.size, dtype=self.format.dtype
        )
        for pixels, index in zip(images, indices.tolist(), strict=True):
            labels.append(self.load_into(pixels, part, index, preprocessing))
        return images, np.array(labels)


class EncodedSource(ItemSource):
    """Base class of sources that read encoded image files: folders, and other containers of them.

    A source reads the content of one file; this class decodes, crops and resizes it. Both may run in several threads.
    """

    @abstractmethod
    def image_names(self, part: Part) -> Sequence[str]:
        """Return the names of the images of a part, such as paths relative to a folder."""

    @abstractmethod
    def describe(self, part: Part, index: int) -> str:
        """Return the name of an image in messages, which the source may have to read."""

    @abstractmethod
    def read_encoded(self, part: Part, index: int) -> bytes:
        """Read the content of one image file. Raises UnreadableImageError."""

    def load_into(self, pixels: Images, part: Part, index: int, preprocessing: Preprocessing) -> Label:
        """See `ItemSource.load_into`."""
        data = self.read_encoded(part, index)
        with named_image(partial(self.describe, part, index)):
            decode_into(pixels, data, preprocessing, index)
        label: Label = self.get_labels(part)[index]
        return label
