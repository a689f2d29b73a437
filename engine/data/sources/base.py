"""What every source of images offers, and the one for images that lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.data.sampler import Indices, Part

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
# Left, top, right and bottom of a part of an image, in pixels.
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class ImageFormat:
    """What images look like when they reach the model: square, `channels` of them with values 0 to 255, of which
    `mean` and `std` are taken on a scale of 0 to 1."""

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class CropSpec:
    """Parts to cut out of the images of an epoch: `box` gives that of an image by its index, height and width; each is
    brought to `size` x `size`."""

    size: int
    box: Callable[[int, int, int], Box]


class UnreadableImageError(Exception):
    """An image that could be read at the start of the run no longer can; the text names it."""


class ImageSource(Protocol):
    """Images with labels in two parts. Cheap to make, cheap to pickle, and free of torch."""

    @property
    def format(self) -> ImageFormat: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def in_memory(self) -> bool: ...
    @property
    def skipped(self) -> tuple[str, ...]:
        """Files that were left out, each with the reason."""
        ...

    def num_images(self, part: Part) -> int: ...

    def get_labels(self, part: Part) -> Labels: ...

    def load(self, part: Part, indices: Indices, crop: CropSpec | None = None) -> tuple[Images, Labels]:
        """Images as N x C x H x W, in the source's own size and channels, and their labels. With `crop` each image is
        cut in the size that it is stored in, and has the size that `crop` says. Raises UnreadableImageError."""
        ...
