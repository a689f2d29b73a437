"""Where an image is cropped and resized: torchvision's Resize and CenterCrop, timm's crop modes, and random crops.

`engine.data.sources.image` applies the plan with Pillow, `engine.data.sources.torch_resize` with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

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
# A longer image is not resized as a whole: the result can exceed the memory.
MAX_ASPECT_RATIO = 8


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
        resized = cropped.resize((self.width, self.height), FILTERS[self.interpolation])
        if resized.size == (self.size, self.size):
            return resized
        return resized.crop((self.left, self.top, self.left + self.size, self.top + self.size))


def plan_resize(
    preprocessing: Preprocessing, height: int, width: int, get_box: BoxFunction | None = None
) -> ResizePlan:
    """Return what to crop and resize in an image. `get_box` replaces the box and the center crop."""
    size, resize = preprocessing.size, preprocessing.resize
    if get_box is not None or resize is None:
        box = get_box(height, width) if get_box is not None else fit_box(preprocessing.fit, height, width)
        return ResizePlan(box, size, size, 0, 0, size, preprocessing.interpolation)
    new_width, new_height, left, top = resize, resize, 0, 0
    if preprocessing.fit == "crop":
        # Of a longer image, the ends would be resized only to be cropped off.
        longest = MAX_ASPECT_RATIO * min(height, width)
        left, top = max(width - longest, 0) // 2, max(height - longest, 0) // 2
        width, height = min(width, longest), min(height, longest)
        # torchvision truncates the longer edge, and rounds the offset of the center crop to the even neighbor.
        shorter = min(height, width)
        new_width, new_height = (int(resize * edge / shorter) if edge > shorter else resize for edge in (width, height))
    box = left, top, left + width, top + height
    left, top = round((new_width - size) / 2), round((new_height - size) / 2)
    return ResizePlan(box, new_width, new_height, left, top, size, preprocessing.interpolation)


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
