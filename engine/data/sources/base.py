"""The interface of image sources, and the types that they share with augmentation and the input pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.data.fingerprint import Fingerprint
from engine.data.sampler import Indices, Part

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
# Left, top, right and bottom in pixels, as in Pillow's Image.crop.
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class ImageFormat:
    """Size, channels and normalization of square images. `mean` and `std` are per channel, on a scale of 0 to 1."""

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class CropSpec:
    """Random resized crop of an epoch: `box(index, height, width)` is the box to crop and resize to `size` x `size`."""

    size: int
    box: Callable[[int, int, int], Box]


class UnreadableImageError(Exception):
    """An image cannot be read or decoded. The message names it."""


class ImageSource(Protocol):
    """Labeled images in a training and a validation part.

    A source is cheap to create and to pickle, and creating it does not import torch.
    """

    @property
    def format(self) -> ImageFormat:
        """Size and channels in which `load` returns images, and their normalization."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, indexed by label."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether the images are in memory or generated, so that `load` reads no files."""
        ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Unusable files found when the source was opened, each with the reason in parentheses."""
        ...

    def num_images(self, part: Part) -> int:
        """Return the number of images of a part."""
        ...

    def get_labels(self, part: Part) -> Labels:
        """Return the labels of a part, N int64."""
        ...

    def fingerprint(self, part: Part) -> Fingerprint:
        """Return the fingerprint of a part, from what the source knows without reading an image."""
        ...

    def load(self, part: Part, indices: Indices, crop: CropSpec | None = None) -> tuple[Images, Labels]:
        """Load images, N x C x H x W uint8 in the source's size and channels, and labels, N int64.

        With `crop`, each image is cropped at its stored resolution and resized to `crop.size`. Raises
        UnreadableImageError.
        """
        ...
