"""Sources that store encoded image files: folders, and other containers of them.

A source reads the content of one file; this module decodes, crops and resizes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.data.sampler import Indices, Part
from engine.data.sources import image
from engine.data.sources.base import CropSpec, ImageFormat, Images, ImageSource, Labels
from engine.data.sources.image import empty_images
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
        images = new_batch(len(indices), self.format, crop)
        for pixels, index in zip(images, indices.tolist(), strict=True):
            self.load_into(pixels, part, index, crop)
        return images, self.labels_of(part, indices)

    def load_into(self, pixels: Images, part: Part, index: int, crop: CropSpec | None) -> None:
        """Load one image, as `load` says, to its place in a batch. Raises UnreadableImageError."""
        encoded = self.read_encoded(part, index)
        decode_pixels(encoded, index, self.format, crop).resize_into(pixels)

    def labels_of(self, part: Part, indices: Indices) -> Labels:
        """Return the labels of some images of a part, N int64."""
        return self.get_labels(part)[indices]


def new_batch(count: int, image_format: ImageFormat, crop: CropSpec | None) -> Images:
    """Return an uninitialized batch, N x C x size x size uint8, with the channels last in memory."""
    size = crop.size if crop is not None else image_format.val_size
    return empty_images(count, image_format.channels, size, size)


def decode_pixels(
    encoded: EncodedImage, index: int, image_format: ImageFormat, crop: CropSpec | None
) -> image.DecodedImage:
    """Decode the image `index` of a part as far as `DecodedImage.resize_into` needs it for a row of the batch.

    Raises UnreadableImageError.
    """
    image_format, get_box = crop_format(crop, index, image_format)
    return image.decode_pixels(encoded.data, encoded.name, image_format, get_box)
