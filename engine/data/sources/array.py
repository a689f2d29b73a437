"""A dataset whose images are one array in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.data.sampler import Indices, Part
from engine.data.sources.base import Crop, ImageFormat, Images, Labels


@dataclass(frozen=True)
class ArraySource:
    """Images that lie in memory, N x C x H x W. `key` is theirs in the cache that they were taken from, if any;
    `problem` is for the log."""

    format: ImageFormat
    classes: tuple[str, ...]
    images: dict[Part, Images]
    labels: dict[Part, Labels]
    key: str = ""
    problem: str | None = None
    in_memory: bool = field(default=True, init=False)
    skipped: tuple[str, ...] = field(default=(), init=False)

    def count(self, part: Part) -> int:
        return len(self.labels[part])

    def labels_of(self, part: Part) -> Labels:
        return self.labels[part]

    def load(self, part: Part, indices: Indices, crop: Crop | None = None) -> tuple[Images, Labels]:
        images = self.images[part][indices]
        if crop is not None:
            from engine.data.sources.image import cut_out

            images = cut_out(images, indices, crop)
        return images, self.labels[part][indices]
