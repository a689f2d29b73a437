"""Where an image is cropped and resized: torchvision's Resize and CenterCrop, timm's crop modes, and random crops.

`engine.data.sources.image` applies the plan with Pillow, `engine.data.sources.torch_resize` with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engine.config.data_sections import Fit, Interpolation
from engine.data.sources.base import Box, CropSpec, ImageFormat, Preprocessing

# Maps the height and width of an image to the box to crop.
BoxFunction = Callable[[int, int], Box]
FILTERS: dict[Interpolation, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# Pixels on each side of a position that the widest filter (Lanczos) reads.
MAX_FILTER_SUPPORT = 3
# A longer image is not resized as a whole: most of the result would be cropped off, and it can exceed the memory.
MAX_WHOLE_ASPECT_RATIO = 8


@dataclass(frozen=True)
class ResizePlan:
    """Crop `box`, resize it to `width` x `height`, then crop `size` x `size` pixels at `left`, `top`."""

    box: Box
    width: int
    height: int
    left: int
    top: int
    size: int
    interpolation: Interpolation

    @property
    def is_elongated(self) -> bool:
        """Whether the resized image is much longer than the crop."""
        long, short = max(self.width, self.height), min(self.width, self.height)
        return long > MAX_WHOLE_ASPECT_RATIO * short

    def min_source_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the smallest width and height to which an image may be decoded without a loss of resolution."""
        left, top, right, bottom = self.box
        return ceil(width * self.width / (right - left)), ceil(height * self.height / (bottom - top))

    def scaled(self, scale_x: float, scale_y: float) -> ResizePlan:
        """Return the plan for an image that was decoded at reduced scale."""
        left, top, right, bottom = self.box
        box = round(left * scale_x), round(top * scale_y), round(right * scale_x), round(bottom * scale_y)
        return replace(self, box=box)

    def apply(self, image: Image.Image) -> Image.Image:
        """Crop and resize an image with Pillow."""
        cropped = image if self.box == (0, 0, *image.size) else image.crop(self.box)
        if self.is_elongated:
            return self._resize_center(cropped)
        resized = cropped.resize((self.width, self.height), FILTERS[self.interpolation])
        if resized.size == (self.size, self.size):
            return resized
        return resized.crop((self.left, self.top, self.left + self.size, self.top + self.size))

    def _resize_center(self, image: Image.Image) -> Image.Image:
        """Resize only what the crop shows. Horizontally first, as Pillow does, because it rounds between its passes."""
        end_x, end_y = self.left + self.size, self.top + self.size
        if self.interpolation == "nearest":
            columns = _nearest_positions(image.width, self.width)[self.left : end_x]
            rows = _nearest_positions(image.height, self.height)[self.top : end_y]
            return Image.fromarray(np.asarray(image)[rows][:, columns])
        resampling = FILTERS[self.interpolation]
        if self.height > self.width:
            first, last = _source_range(self.top, end_y, image.height, self.height)
            scale, rows_needed = image.height / self.height, image.crop((0, first, image.width, last))
            wide = rows_needed.resize((self.width, last - first), resampling).crop((self.left, 0, end_x, last - first))
            return wide.resize(
                (self.size, self.size), resampling, (0, self.top * scale - first, self.size, end_y * scale - first)
            )
        first, last = _source_range(self.left, end_x, image.width, self.width)
        scale, columns_needed = image.width / self.width, image.crop((first, 0, last, image.height))
        narrow = columns_needed.resize(
            (self.size, image.height),
            resampling,
            (self.left * scale - first, 0, end_x * scale - first, image.height),
        )
        return narrow.resize((self.size, self.height), resampling).crop((0, self.top, self.size, end_y))


def plan_resize(
    preprocessing: Preprocessing, height: int, width: int, get_box: BoxFunction | None = None
) -> ResizePlan:
    """Return what to crop and resize in an image. `get_box` replaces the box and the center crop."""
    size, resize = preprocessing.size, preprocessing.resize
    if get_box is not None or resize is None:
        box = get_box(height, width) if get_box is not None else fit_box(preprocessing.fit, height, width)
        return ResizePlan(box, size, size, 0, 0, size, preprocessing.interpolation)
    new_width, new_height = resize, resize
    if preprocessing.fit == "crop":
        # torchvision truncates the longer edge, and rounds the offset of the center crop to the even neighbor.
        shorter = min(height, width)
        new_width, new_height = (int(resize * edge / shorter) if edge > shorter else resize for edge in (width, height))
    left, top = round((new_width - size) / 2), round((new_height - size) / 2)
    return ResizePlan((0, 0, width, height), new_width, new_height, left, top, size, preprocessing.interpolation)


def crop_format(crop: CropSpec | None, index: int, image_format: ImageFormat) -> tuple[ImageFormat, BoxFunction | None]:
    """Return the format with the size of a crop, and the function that gives the box of an image for training; None for
    evaluation."""
    if crop is None:
        return image_format, None
    if crop.size != image_format.size:
        image_format = replace(image_format, size=crop.size)
    return image_format, partial(fit_box, image_format.fit) if crop.box is None else partial(crop.box, index)


def fit_box(fit: Fit, height: int, width: int) -> Box:
    """Return the box that becomes the square input: the largest center square (crop) or the whole image (squash)."""
    return center_box(height, width) if fit == "crop" else (0, 0, width, height)


def center_box(height: int, width: int) -> Box:
    """Return the largest center square."""
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def _source_range(start: int, end: int, length: int, resized_length: int) -> tuple[int, int]:
    """Return the range of source pixels that the resized pixels `start` to `end` of an axis depend on."""
    scale = length / resized_length
    margin = MAX_FILTER_SUPPORT * max(scale, 1.0) + 1
    return max(floor(start * scale - margin), 0), min(ceil(end * scale + margin), length)


def _nearest_positions(length: int, resized_length: int) -> NDArray[np.int64]:
    """Return the source pixel of each resized pixel of an axis, with the running sum of `ImagingScaleAffine` in
    Pillow's Geometry.c."""
    steps = np.full(resized_length, length / resized_length)
    steps[0] /= 2
    return np.cumsum(steps).astype(np.int64)
