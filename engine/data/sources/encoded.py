"""Sources that store encoded image files: folders, and other containers of them.

A source reads the content of one file; this module decodes, crops and resizes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.data.sampler import Indices, Part
from engine.data.sources.base import CropSpec, Images, ImageSource, Labels
from engine.data.sources.image import decode_pixels, empty_images
from engine.data.sources.resize import crop_format


@dataclass(frozen=True)
class EncodedImage:
    """The content of one image file. `name` returns the name of the image in messages, which it may have to read."""

    data: bytes
    name: Callable[[], str]


class EncodedSource(ImageSource):
    """Base class of sources that read encoded image files. Reading and decoding may run in several threads."""

    @property
    @abstractmethod
    def cache_root(self) -> str:
        """What holds the images, as a part of the key of their decoded cache: a folder, or the digest of a file."""

    @abstractmethod
    def cache_stamp(self, part: Part, index: int) -> bytes:
        """Return bytes that change with the name and the content of an image, for the same key. Raises OSError."""

    @abstractmethod
    def image_names(self, part: Part) -> Sequence[str]:
        """Return the names of the images of a part, such as paths relative to a folder."""

    @abstractmethod
    def read_encoded(self, part: Part, index: int) -> EncodedImage:
        """Read the content of one image file. Raises UnreadableImageError."""

    def load(self, part: Part, indices: Indices, crop: CropSpec | None = None) -> tuple[Images, Labels]:
        """See `ImageSource.load`."""
        size = crop.size if crop is not None else self.format.val_size
        # With the channels last in memory.
        images = empty_images(len(indices), self.format.channels, size, size)
        for pixels, index in zip(images, indices.tolist(), strict=True):
            self.load_into(pixels, part, index, crop)
        return images, self.get_labels(part)[indices]

    def load_into(self, pixels: Images, part: Part, index: int, crop: CropSpec | None) -> None:
        """Load one image, as `load` says, to its place in a batch. Raises UnreadableImageError."""
        encoded, (image_format, get_box) = self.read_encoded(part, index), crop_format(crop, index, self.format)
        decode_pixels(encoded.data, encoded.name, image_format, get_box).resize_into(pixels)
