"""What is cut out of one image at random, without NumPy: a loader process learns an image's size when it opens it, and
for arrays of one number NumPy would take a third of the time that the image does."""

from __future__ import annotations

import math

from engine.data.rectangles import TRIES
from engine.data.sampler import Stream, image_bits
from engine.data.source import Box
from engine.sections import Pair


def cut_box(scale: Pair, ratio: Pair, height: int, width: int, seed: int, epoch: int, index: int) -> Box:
    """The same as `cut_rectangles` of that image."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(TRIES):
        first, second = _uniform(image_bits(seed, Stream.RESIZED_CROP, epoch, index * TRIES + attempt))
        pixels = height * width * (scale[0] + (scale[1] - scale[0]) * first)
        shape = math.exp(low + (high - low) * second)
        tall, broad = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 0 < tall <= height and 0 < broad <= width:
            down, across = _uniform(image_bits(seed, Stream.RESIZED_CROP_PLACE, epoch, index))
            return _box(int(across * (width - broad + 1)), int(down * (height - tall + 1)), broad, tall)
    tall = min(height, max(round(width / ratio[0]), 1))
    broad = min(width, max(round(height * ratio[1]), 1))
    return _box((width - broad) // 2, (height - tall) // 2, broad, tall)


def _uniform(bits: int) -> tuple[float, float]:
    """From 0 up to, but not 1, by the upper and by the lower half of 64 random bits."""
    return (bits >> 32) * 2.0**-32, (bits & 0xFFFFFFFF) * 2.0**-32


def _box(left: int, top: int, width: int, height: int) -> Box:
    return left, top, left + width, top + height
