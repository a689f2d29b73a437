"""A source whose images are arrays in memory: digits and torchvision's datasets."""

from __future__ import annotations

from dataclasses import dataclass

from engine.data.sampler import Indices, Part
from engine.data.sources.base import CropSpec, ImageFormat, Images, ImageSource, Labels
from engine.utils.errors import Problem


@dataclass(frozen=True)
class ArraySource(ImageSource):
    """Images in memory, one N x C x H x W uint8 array per part, with N int64 labels.

    `cache_key` is the key of the images in the decoded cache, empty if they are not cached. `warning` is for the log.
    """

    format: ImageFormat
    classes: tuple[str, ...]
    images: dict[Part, Images]
    labels: dict[Part, Labels]
    cache_key: str = ""
    warning: Problem | None = None
    in_memory = True

    def load(self, part: Part, indices: Indices, crop: CropSpec | None = None) -> tuple[Images, Labels]:
        images = self.images[part][indices]
        if crop is not None:
            from engine.data.sources.image import crop_images

            images = crop_images(images, indices, crop)
        return images, self.labels[part][indices]
