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
from engine.data.sampler import Indices, RandomStream, image_random_bits, random_bits
from engine.data.sources.base import Box

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
    found = np.zeros((len(indices), 4), np.int64)
    chosen = np.flatnonzero(_uniform(random_bits(seed, RandomStream.ERASING, epoch, indices), "high") < probability)
    indices = indices[chosen]
    area, ratio = _draw_shapes(ERASING_SCALE, ERASING_RATIO, seed, RandomStream.ERASING_SHAPE, epoch, indices)
    heights = np.rint(np.sqrt(image_size * image_size * area * ratio)).astype(np.int64)
    widths = np.rint(np.sqrt(image_size * image_size * area / ratio)).astype(np.int64)
    height, width, fits = _first_fitting((heights < image_size) & (widths < image_size), heights, widths)
    drawn = _draw_positions(
        height=height,
        width=width,
        image_height=image_size,
        image_width=image_size,
        seed=seed,
        stream=RandomStream.ERASING_POSITION,
        epoch=epoch,
        indices=indices,
    )
    found[chosen[fits]] = drawn[fits]
    return found


def random_resized_crop_boxes(
    scale: FloatPair,
    ratio: FloatPair,
    heights: Lengths | int,
    widths: Lengths | int,
    seed: int,
    epoch: int,
    indices: Indices,
) -> Boxes:
    """Draw the boxes to crop from images of the given sizes, N x 4 int64.

    `scale` is the range of the crop's share of the image area, `ratio` that of width / height. `heights` and `widths`
    are arrays of shape N or one integer for all images. If no drawn shape fits, the box is a center crop. The
    distribution is that of torchvision's v2.RandomResizedCrop (Szegedy et al., "Going Deeper with Convolutions", 2014).
    """
    high = np.broadcast_to(heights, len(indices))
    wide = np.broadcast_to(widths, len(indices))
    area, shape = _draw_shapes(scale, ratio, seed, RandomStream.RESIZED_CROP_SHAPE, epoch, indices)
    pixels = (high * wide)[:, None] * area
    tall = np.rint(np.sqrt(pixels / shape)).astype(np.int64)
    broad = np.rint(np.sqrt(pixels * shape)).astype(np.int64)
    good = (tall > 0) & (tall <= high[:, None]) & (broad > 0) & (broad <= wide[:, None])
    height, width, fits = _first_fitting(good, tall, broad)
    drawn = _draw_positions(
        height=height,
        width=width,
        image_height=high,
        image_width=wide,
        seed=seed,
        stream=RandomStream.RESIZED_CROP_POSITION,
        epoch=epoch,
        indices=indices,
    )
    # Fallback of torchvision: the largest center crop whose ratio is in range.
    height = np.minimum(high, np.rint(wide / ratio[0]).astype(np.int64).clip(1))
    width = np.minimum(wide, np.rint(high * ratio[1]).astype(np.int64).clip(1))
    left, top = (wide - width) // 2, (high - height) // 2
    middle = np.stack([left, top, left + width, top + height], 1)
    return np.where(fits[:, None], drawn, middle)


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
    rows, first = np.arange(len(fits)), fits.argmax(1) if len(fits) else np.zeros(0, np.int64)
    found = fits[rows, first]
    return np.where(found, heights[rows, first], 0), np.where(found, widths[rows, first], 0), found


def _draw_positions(
    height: Lengths,
    width: Lengths,
    image_height: Lengths | int,
    image_width: Lengths | int,
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
    taken = bits >> np.uint64(32) if half == "high" else bits & np.uint64(0xFFFFFFFF)
    return taken.astype(np.float64) * 2.0**-32


def random_resized_crop_box(
    scale: FloatPair, ratio: FloatPair, height: int, width: int, seed: int, epoch: int, index: int
) -> Box:
    """Draw the box to crop from one image; the same box as `random_resized_crop_boxes` draws for it."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(MAX_ATTEMPTS):
        first, second = _uniform_pair(
            image_random_bits(seed, RandomStream.RESIZED_CROP_SHAPE, epoch, index * MAX_ATTEMPTS + attempt)
        )
        pixels = height * width * (scale[0] + (scale[1] - scale[0]) * first)
        shape = math.exp(low + (high - low) * second)
        tall, broad = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 0 < tall <= height and 0 < broad <= width:
            down, across = _uniform_pair(image_random_bits(seed, RandomStream.RESIZED_CROP_POSITION, epoch, index))
            return _xyxy_box(int(across * (width - broad + 1)), int(down * (height - tall + 1)), broad, tall)
    tall = min(height, max(round(width / ratio[0]), 1))
    broad = min(width, max(round(height * ratio[1]), 1))
    return _xyxy_box((width - broad) // 2, (height - tall) // 2, broad, tall)


def _uniform_pair(bits: int) -> tuple[float, float]:
    """Map the high and the low 32 of 64 random bits to two floats in [0, 1)."""
    return (bits >> 32) * 2.0**-32, (bits & 0xFFFFFFFF) * 2.0**-32


def _xyxy_box(left: int, top: int, width: int, height: int) -> Box:
    return left, top, left + width, top + height
