"""Decode single image files: EXIF orientation, crop, resize and mode conversion with Pillow.

A JPEG that is needed at full scale is decoded by the faster `engine.data.sources.jpeg`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from math import ceil
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

from engine.data.sampler import Indices
from engine.data.sources.base import Box, CropSpec, ImageFormat, Images, UnreadableImageError
from engine.data.sources.image_file import (
    UnusableImageError,
    decode_error_reason,
    decoding,
    open_image,
    read_image_file,
)

# EXIF orientations that swap height and width.
_TRANSPOSED_ORIENTATIONS = (5, 6, 7, 8)
_ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
# Maps the height and width of an image to the box to crop.
BoxFunction = Callable[[int, int], Box]


def read_image(path: Path, image_format: ImageFormat, get_box: BoxFunction | None = None) -> Images:
    """Read an image file, C x size x size uint8.

    The image is rotated according to EXIF, then the box of `get_box` (by default the largest center square) is cropped
    and resized. Raises UnreadableImageError.
    """
    try:
        return _decode(read_image_file(path), image_format, get_box or center_box)
    except UnusableImageError as error:
        raise UnreadableImageError(f"the image {path} cannot be read: it is {error}") from error
    except Exception as error:
        # Decoders raise arbitrary exceptions for a damaged file.
        raise UnreadableImageError(f"the image {path} cannot be read: {decode_error_reason(error)}") from error


def _decode(file: BytesIO, image_format: ImageFormat, get_box: BoxFunction) -> Images:
    size, mode = image_format.size, _pil_mode(image_format)
    with open_image(file) as image, ExitStack() as pixel_budget:
        if image.format != "JPEG":
            # Pillow decodes a PNG to look for EXIF data behind its pixels.
            pixel_budget.enter_context(decoding(image))
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        swaps_axes = orientation in _TRANSPOSED_ORIENTATIONS
        width, height = image.size[::-1] if swaps_axes else image.size
        left, top, right, bottom = get_box(height, width)
        min_size = (ceil(width * size / (right - left)), ceil(height * size / (bottom - top)))
        full_size = image.size
        # Pillow's draft mode decodes a JPEG directly at 1/2, 1/4 or 1/8 scale if that is large enough; torchvision
        # cannot. At full scale torchvision's decoder and torch's resize take two thirds of Pillow's time.
        image.draft(mode, min_size[::-1] if swaps_axes else min_size)
        if image.format == "JPEG":
            pixel_budget.enter_context(decoding(image))
            if image.size == full_size and orientation == 1 and image.mode in ("L", "RGB"):
                from engine.data.sources import jpeg

                if (pixels := jpeg.decode(file.getvalue(), mode)) is not None:
                    return jpeg.resized_crop(pixels, size, (left, top, right, bottom))
        upright = convert_mode(rotate_upright(image), mode)
        scale_x, scale_y = upright.width / width, upright.height / height
        box = (round(left * scale_x), round(top * scale_y), round(right * scale_x), round(bottom * scale_y))
        return _resized_crop(upright, size, box)


def rotate_upright(image: Image.Image) -> Image.Image:
    """Rotate an image according to EXIF; the image itself, not a copy, if it is upright."""
    is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    return image if is_upright else ImageOps.exif_transpose(image)


def pil_to_format(image: Image.Image, image_format: ImageFormat, get_box: BoxFunction | None = None) -> Images:
    """Convert a Pillow image like `read_image`, C x size x size uint8, without EXIF rotation.

    Raises ValueError if the mode is unsupported, or the exception of Pillow's decoder.
    """
    image = convert_mode(image, _pil_mode(image_format))
    return _resized_crop(image, image_format.size, (get_box or center_box)(image.height, image.width))


def center_box(height: int, width: int) -> Box:
    """Return the largest center square."""
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def crop_images(images: Images, indices: Indices, crop: CropSpec) -> Images:
    """Crop and resize each image, N x C x H x W uint8, to N x C x size x size uint8."""
    crop_format = ImageFormat(crop.size, images.shape[1], (), ())
    get_boxes = [partial(crop.box, int(index)) for index in indices]
    return np.stack(
        [
            pil_to_format(_from_array(pixels), crop_format, get_box)
            for pixels, get_box in zip(images, get_boxes, strict=True)
        ]
    )


def convert_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert an image to mode "L" or "RGB", with transparent pixels composited on white.

    Raises ValueError for floating-point images, whose value range is not defined.
    """
    image = _to_eight_bits(image)
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        # The color stored for a transparent pixel is arbitrary.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grayscale to 8 bits; Pillow's own conversion clips at 255."""
    if image.mode == "F":
        raise ValueError("floating-point pixels (Pillow mode F) are not supported")
    if not image.mode.startswith("I"):
        return image
    shades = np.asarray(image).astype(np.int64) // 257
    return Image.fromarray(shades.clip(0, 255).astype(np.uint8))


def _pil_mode(image_format: ImageFormat) -> str:
    return "L" if image_format.channels == 1 else "RGB"


def _resized_crop(image: Image.Image, size: int, box: Box) -> Images:
    cropped = image if box == (0, 0, *image.size) else image.crop(box)
    return _to_array(cropped.resize((size, size), Image.Resampling.BILINEAR))


def _to_array(image: Image.Image) -> Images:
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _from_array(pixels: Images) -> Image.Image:
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
