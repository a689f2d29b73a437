"""Random boxes for RandomErasing and RandomResizedCrop, as pure NumPy functions of seed, epoch and image index.

The scalar `random_resized_crop_box` serves sources that crop single image files; it returns the same boxes as the
vectorized `random_resized_crop_boxes`.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.config.section import FloatPair
from engine.train.data.sampler import Indices, RandomStream, image_random_bits, random_bits
from engine.train.data.sources.formats import Box

# One box per image in pixels (left, top, right, bottom), N x 4.
Boxes = NDArray[np.int64]
Lengths = NDArray[np.int64]
# Shapes drawn per image until one fits, as in torchvision's transforms.
MAX_ATTEMPTS = 10
# Defaults of torchvision's v2.RandomErasing: share of the image area, and height / width.
ERASING_SCALE, ERASING_RATIO = (0.02, 0.33), (0.3, 3.3)


def random_erasing_boxes(probability: float, image_size: int, seed: int, epoch: int, indices: Indices) -> Boxes:
    """Draw the boxes to erase in square images of `image_size`, N x 4 int64.

    Each image is erased with the given probability. The box is empty if it is not, or if none of the drawn shapes is
    smaller than the image. The distribution is that of torchvision's v2.RandomErasing (Zhong et al., "Random Erasing
    Data Augmentation", 2017).
    """
    boxes = np.zeros((len(indices), 4), np.int64)
    erased = np.flatnonzero(_uniform(random_bits(seed, RandomStream.ERASING, epoch, indices), "high") < probability)
    indices = indices[erased]
    area, ratio = _draw_shapes(ERASING_SCALE, ERASING_RATIO, seed, RandomStream.ERASING_SHAPE, epoch, indices)
    heights = np.rint(np.sqrt(image_size * image_size * area * ratio)).astype(np.int64)
    widths = np.rint(np.sqrt(image_size * image_size * area / ratio)).astype(np.int64)
    height, width, fits = _first_fitting((heights < image_size) & (widths < image_size), heights, widths)
    drawn_boxes = _draw_positions(
        height=height,
        width=width,
        image_height=image_size,
        image_width=image_size,
        seed=seed,
        stream=RandomStream.ERASING_POSITION,
        epoch=epoch,
        indices=indices,
    )
    boxes[erased[fits]] = drawn_boxes[fits]
    return boxes


def random_resized_crop_boxes(
    scale: FloatPair,
    ratio: FloatPair,
    image_height: int,
    image_width: int,
    seed: int,
    epoch: int,
    indices: Indices,
) -> Boxes:
    """Draw the boxes to crop from images of one size, N x 4 int64.

    `scale` is the range of the crop's share of the image area, `ratio` that of width / height. If no drawn shape fits,
    the box is a center crop. The distribution is that of torchvision's v2.RandomResizedCrop (Szegedy et al., "Going
    Deeper with Convolutions", 2014).
    """
    scales, ratios = _draw_shapes(scale, ratio, seed, RandomStream.RESIZED_CROP_SHAPE, epoch, indices)
    crop_areas = image_height * image_width * scales
    crop_heights = np.rint(np.sqrt(crop_areas / ratios)).astype(np.int64)
    crop_widths = np.rint(np.sqrt(crop_areas * ratios)).astype(np.int64)
    is_inside = (crop_heights > 0) & (crop_heights <= image_height) & (crop_widths > 0) & (crop_widths <= image_width)
    height, width, fits = _first_fitting(is_inside, crop_heights, crop_widths)
    drawn_boxes = _draw_positions(
        height=height,
        width=width,
        image_height=image_height,
        image_width=image_width,
        seed=seed,
        stream=RandomStream.RESIZED_CROP_POSITION,
        epoch=epoch,
        indices=indices,
    )
    return np.where(fits[:, None], drawn_boxes, _center_crop(ratio, image_height, image_width))


def _center_crop(ratio: FloatPair, image_height: int, image_width: int) -> Box:
    """Return the largest center crop whose ratio is in range, the fallback of torchvision."""
    height = min(image_height, max(round(image_width / ratio[0]), 1))
    width = min(image_width, max(round(image_height * ratio[1]), 1))
    left, top = (image_width - width) // 2, (image_height - height) // 2
    return left, top, left + width, top + height


def _draw_shapes(
    scale: FloatPair, ratio: FloatPair, seed: int, stream: RandomStream, epoch: int, indices: Indices
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw area shares (uniform) and aspect ratios (log-uniform), N x MAX_ATTEMPTS float64 each."""
    bits = random_bits(seed, stream, epoch, indices[:, None] * MAX_ATTEMPTS + np.arange(MAX_ATTEMPTS))
    area = scale[0] + (scale[1] - scale[0]) * _uniform(bits, "high")
    low, high = np.log(ratio)
    return area, np.exp(low + (high - low) * _uniform(bits, "low"))


def _first_fitting(
    fits: NDArray[np.bool_], heights: Lengths, widths: Lengths
) -> tuple[Lengths, Lengths, NDArray[np.bool_]]:
    """Return height and width of the first fitting attempt per row (0 if none fits), and whether one fits; N each."""
    rows, first_fit = np.arange(len(fits)), fits.argmax(1) if len(fits) else np.zeros(0, np.int64)
    any_fits = fits[rows, first_fit]
    return np.where(any_fits, heights[rows, first_fit], 0), np.where(any_fits, widths[rows, first_fit], 0), any_fits


def _draw_positions(
    height: Lengths,
    width: Lengths,
    image_height: int,
    image_width: int,
    seed: int,
    stream: RandomStream,
    epoch: int,
    indices: Indices,
) -> Boxes:
    """Place each box at a uniformly distributed position in its image."""
    bits = random_bits(seed, stream, epoch, indices)
    top = (_uniform(bits, "high") * (image_height - height + 1)).astype(np.int64)
    left = (_uniform(bits, "low") * (image_width - width + 1)).astype(np.int64)
    return np.stack([left, top, left + width, top + height], 1)


def _uniform(bits: NDArray[np.uint64], half: Literal["high", "low"]) -> NDArray[np.float64]:
    """Map the high or low 32 of 64 random bits to a float64 in [0, 1)."""
    half_bits = bits >> np.uint64(32) if half == "high" else bits & np.uint64(0xFFFFFFFF)
    return half_bits.astype(np.float64) * 2.0**-32


def random_resized_crop_box(
    scale: FloatPair, ratio: FloatPair, seed: int, epoch: int, index: int, height: int, width: int
) -> Box:
    """Draw the box to crop from one image; the same box as `random_resized_crop_boxes` draws for it."""
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(MAX_ATTEMPTS):
        bits = image_random_bits(seed, RandomStream.RESIZED_CROP_SHAPE, epoch, index * MAX_ATTEMPTS + attempt)
        crop_area = height * width * (scale[0] + (scale[1] - scale[0]) * _high(bits))
        crop_ratio = math.exp(log_low + (log_high - log_low) * _low(bits))
        crop_height, crop_width = round(math.sqrt(crop_area / crop_ratio)), round(math.sqrt(crop_area * crop_ratio))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            bits = image_random_bits(seed, RandomStream.RESIZED_CROP_POSITION, epoch, index)
            left, top = int(_low(bits) * (width - crop_width + 1)), int(_high(bits) * (height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    return _center_crop(ratio, height, width)


def _high(bits: int) -> float:
    """Map the high 32 of 64 random bits to a float in [0, 1)."""
    return (bits >> 32) * 2.0**-32


def _low(bits: int) -> float:
    """Map the low 32 of 64 random bits to a float in [0, 1)."""
    return (bits & 0xFFFFFFFF) * 2.0**-32
