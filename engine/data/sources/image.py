"""Decode single image files: EXIF orientation, crop, resize and mode conversion.

Ordinary JPEG files are decoded by `engine.data.sources.jpeg`, and resized by `engine.data.sources.torch_resize`. Pillow
does all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

from engine.data.sampler import Indices
from engine.data.sources import jpeg
from engine.data.sources.base import CropSpec, ImageFormat, Images, Preprocessing, UnreadableImageError
from engine.data.sources.image_file import (
    UnusableImageError,
    decode_error_reason,
    decoding,
    open_image,
    read_image_file,
    reserve_pixels,
)
from engine.data.sources.resize import BoxFunction, ResizePlan, plan_resize

# EXIF orientations that swap height and width.
_TRANSPOSED_ORIENTATIONS = (5, 6, 7, 8)
# The greatest 16-bit value, 65,535, becomes 255.
SIXTEEN_BIT_DIVISOR = 257
ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
# A quarter of the pixel budget is 64 threads that decode a JPEG of at most this size.
MAX_UNCOUNTED_PIXELS = 1 << 20
# Each thread holds one decoded image of at most this size outside of the pixel budget, 100 MB.
MAX_DEFERRED_PIXELS = 1 << 25


@dataclass(frozen=True)
class DecodedImage:
    """A decoded image, C x H x W uint8, still to be cropped and resized as `plan` says. Without a plan it is ready."""

    pixels: Images
    plan: ResizePlan | None

    def resize_into(self, out: Images) -> None:
        """Write the cropped and resized image to `out`, C x size x size uint8, fastest with the channels last in
        memory."""
        plan = self.plan
        if plan is None:
            out[:] = self.pixels
        elif plan.interpolation == "bilinear" and not plan.is_elongated:
            # Importing torch takes a second, and not every process that reads images needs it.
            from engine.data.sources.torch_resize import resize_into

            resize_into(self.pixels, plan, out)
        else:
            out[:] = _apply(plan, _from_array(self.pixels))


def read_image(path: Path, image_format: ImageFormat, get_box: BoxFunction | None = None) -> Images:
    """Read an image file and decode it as the input of an evaluation, C x val_size x val_size uint8.

    The image is rotated according to EXIF, then resized and cropped as `ImageFormat.evaluation` says. With `get_box`,
    for training, its box is cropped and resized to `size` x `size`. Raises UnreadableImageError.
    """
    with named_image(str(path)):
        data = read_image_file(path)
    decoded = decode_pixels(data, lambda: str(path), image_format, get_box)
    size = image_format.preprocessing(training=get_box is not None).size
    pixels = empty_images(len(decoded.pixels), size, size)
    decoded.resize_into(pixels)
    return pixels


def decode_pixels(
    data: bytes, name: Callable[[], str], image_format: ImageFormat, get_box: BoxFunction | None = None
) -> DecodedImage:
    """Decode the content of an image file as far as `DecodedImage.resize_into` needs it, see `read_image`."""
    try:
        size = jpeg.read_size(data)
        if size is not None and prod(size) <= MAX_DEFERRED_PIXELS:
            decoded = _decode_jpeg(data, *size, image_format, get_box)
            if decoded is not None:
                return decoded
        return DecodedImage(_decode_with_pillow(data, image_format, get_box), None)
    except Exception as error:
        raise _unreadable(name(), error) from error


def empty_images(*shape: int) -> Images:
    """Return uninitialized images, ... x C x H x W uint8, with the channels last in memory."""
    *counts, channels, height, width = shape
    return np.moveaxis(np.empty((*counts, height, width, channels), np.uint8), -1, -3)


@contextmanager
def named_image(name: str) -> Iterator[None]:
    """Raise errors of reading and decoding as an UnreadableImageError that names the image."""
    try:
        yield
    except Exception as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> UnreadableImageError:
    """Return the error of an image whose decoder raised any exception, as it may for a damaged file."""
    if isinstance(error, UnusableImageError):
        return UnreadableImageError(f"the image {name} cannot be read: it is {error}")
    return UnreadableImageError(f"the image {name} cannot be read: {decode_error_reason(error)}")


def _draft(
    image: Image.Image, mode: str, preprocessing: Preprocessing, get_box: BoxFunction | None
) -> tuple[ResizePlan, int, int]:
    """Prepare to decode a JPEG in a mode, and at 1/2, 1/4 or 1/8 scale if that is permitted and large enough.

    Returns what to resize and crop, and the height and width of the upright image at full scale."""
    swaps_axes = image.getexif().get(ExifTags.Base.Orientation, 1) in _TRANSPOSED_ORIENTATIONS
    width, height = image.size[::-1] if swaps_axes else image.size
    plan = plan_resize(preprocessing, height, width, get_box)
    min_size = plan.min_source_size(height, width) if preprocessing.draft else (width, height)
    image.draft(mode, min_size[::-1] if swaps_axes else min_size)
    return plan, height, width


def _decode_jpeg(
    data: bytes, width: int, height: int, image_format: ImageFormat, get_box: BoxFunction | None
) -> DecodedImage | None:
    """Decode an upright JPEG of this size. None if its decoder rejects it."""
    preprocessing = image_format.preprocessing(training=get_box is not None)
    plan = plan_resize(preprocessing, height, width, get_box)
    denominator = 1
    if preprocessing.draft:
        denominator = jpeg.choose_denominator(width, height, *plan.min_source_size(height, width))
    if denominator > 1:
        plan = plan.scaled(-(-width // denominator) / width, -(-height // denominator) / height)
    with reserve_pixels(width * height) if width * height > MAX_UNCOUNTED_PIXELS else nullcontext():
        pixels = jpeg.decode(data, pil_mode(image_format), width, height, denominator)
    return None if pixels is None else DecodedImage(pixels, plan)


def _decode_with_pillow(data: bytes, image_format: ImageFormat, get_box: BoxFunction | None) -> Images:
    mode, preprocessing = pil_mode(image_format), image_format.preprocessing(training=get_box is not None)
    with open_image(data) as image, ExitStack() as pixel_budget:
        if image.format != "JPEG":
            # Pillow decodes a PNG to look for EXIF data behind its pixels.
            pixel_budget.enter_context(decoding(image))
        plan, height, width = _draft(image, mode, preprocessing, get_box)
        if image.format == "JPEG":
            pixel_budget.enter_context(decoding(image))
        upright = convert_mode(rotate_upright(image), mode)
        return _apply(plan.scaled(upright.width / width, upright.height / height), upright)


def rotate_upright(image: Image.Image) -> Image.Image:
    """Rotate an image according to EXIF; the image itself, not a copy, if it is upright."""
    is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    return image if is_upright else ImageOps.exif_transpose(image)


def pil_to_format(image: Image.Image, image_format: ImageFormat, get_box: BoxFunction | None = None) -> Images:
    """Convert a Pillow image like `read_image`, without EXIF rotation.

    Raises ValueError if the mode is unsupported, or the exception of Pillow's decoder.
    """
    image = convert_mode(image, pil_mode(image_format))
    preprocessing = image_format.preprocessing(training=get_box is not None)
    return _apply(plan_resize(preprocessing, image.height, image.width, get_box), image)


def crop_images(images: Images, indices: Indices, crop: CropSpec) -> Images:
    """Crop and resize each image, N x C x H x W uint8, to N x C x size x size uint8. Without a box, return them."""
    if crop.box is None:
        return images
    crop_format = ImageFormat(crop.size, images.shape[1], (), (), interpolation=crop.interpolation)
    get_boxes = [partial(crop.box, int(index)) for index in indices]
    return np.stack(
        [
            pil_to_format(_from_array(pixels), crop_format, get_box)
            for pixels, get_box in zip(images, get_boxes, strict=True)
        ]
    )


def natural_mode(image: Image.Image) -> str:
    """Return the mode of the two that `convert_mode` knows in which an image keeps its colors."""
    return "L" if image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I") else "RGB"


def convert_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert an image to mode "L" or "RGB", with transparent pixels composited on white.

    Raises ValueError for floating-point images, whose value range is not defined.
    """
    image = _to_eight_bits(image)
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        # The color stored for a transparent pixel is arbitrary.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def check_mode(image: Image.Image) -> None:
    """Raise UnusableImageError for an image whose pixels have no defined range: floating-point numbers, and 32-bit or
    signed integers of TIFF. Of other formats, the range of Pillow's mode I is that of 16 bits."""
    kind = "floating-point" if image.mode == "F" else "32-bit or signed integer"
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        kind = f"{kind} pixels (Pillow mode {image.mode})"
        reason = f"an image of {kind}, which have no defined range; convert it to 8 or 16 bits"
        raise UnusableImageError(reason, code="not-supported")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grayscale to 8 bits; Pillow's own conversion clips at 255."""
    check_mode(image)
    if not image.mode.startswith("I"):
        return image
    shades = np.asarray(image).astype(np.int64) // SIXTEEN_BIT_DIVISOR
    return Image.fromarray(shades.clip(0, 255).astype(np.uint8))


def pil_mode(image_format: ImageFormat) -> str:
    """Return the Pillow mode that has the channels of a format."""
    return "L" if image_format.channels == 1 else "RGB"


def _apply(plan: ResizePlan, image: Image.Image) -> Images:
    pixels = np.asarray(plan.apply(image), np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _from_array(pixels: Images) -> Image.Image:
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
