"""Sources that store encoded image files: folders, and other containers of them.

A source reads the content of one file; this module decodes, crops and resizes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from engine.data.sampler import Indices, Part
from engine.data.sources.base import CropSpec, ImageFormat, Images, Labels
from engine.data.sources.image import decode_image
from engine.data.sources.resize import get_box_function


@dataclass(frozen=True)
class EncodedImage:
    """The content of one image file, and the name of the image in messages."""

    data: bytes | memoryview
    name: str


class EncodedSource(ABC):
    """Base class of sources that read encoded image files. Reading and decoding may run in several threads."""

    format: ImageFormat

    @property
    def in_memory(self) -> bool:
        return False

    @property
    @abstractmethod
    def cache_root(self) -> str:
        """What holds the images, as a part of the key of their decoded cache: a folder, or the digest of a file."""

    @abstractmethod
    def cache_stamp(self, part: Part, index: int) -> bytes:
        """Return bytes that change with the name and the content of an image, for the same key. Raises OSError."""

    @abstractmethod
    def with_format(self, image_format: ImageFormat) -> Self:
        """Return the same images in another format."""

    @abstractmethod
    def image_names(self, part: Part) -> Sequence[str]:
        """Return the names of the images of a part, such as paths relative to a folder."""

    @abstractmethod
    def num_images(self, part: Part) -> int:
        """See `ImageSource.num_images`."""

    @abstractmethod
    def get_labels(self, part: Part) -> Labels:
        """See `ImageSource.get_labels`."""

    @abstractmethod
    def read_encoded(self, part: Part, index: int) -> EncodedImage:
        """Read the content of one image file. Raises UnreadableImageError."""

    def load(self, part: Part, indices: Indices, crop: CropSpec | None = None) -> tuple[Images, Labels]:
        """See `ImageSource.load`."""
        size = crop.size if crop is not None else self.format.val_size
        images = np.empty((len(indices), self.format.channels, size, size), np.uint8)
        for row, index in enumerate(indices.tolist()):
            encoded = self.read_encoded(part, index)
            images[row] = decode_for_crop(encoded, index, self.format, crop)
        return images, self.get_labels(part)[indices]


def decode_for_crop(encoded: EncodedImage, index: int, image_format: ImageFormat, crop: CropSpec | None) -> Images:
    """Decode the image `index` of a part, C x size x size uint8, as `ImageSource.load` says. Raises
    UnreadableImageError."""
    get_box = get_box_function(crop, index, image_format)
    if crop is not None:
        image_format = replace(image_format, size=crop.size)
    return decode_image(encoded.data, encoded.name, image_format, get_box)
