"""Single images as Pillow has them: read, turned upright, cut, and brought to a size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps

from engine.data.sampler import Indices
from engine.data.sources.base import Box, CropSpec, ImageFormat, Images, UnreadableImageError

# Orientations of EXIF by which height and width change places.
_TRANSPOSED_ORIENTATIONS = (5, 6, 7, 8)
_ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
# What to cut out of an image of a height and a width.
BoxFunction = Callable[[int, int], Box]


def read_image(path: Path, image_format: ImageFormat, get_box: BoxFunction | None = None) -> Images:
    """The image as C x H x W: upright, and that part of it brought to the size which `get_box` names, or the largest
    square in its middle. Raises UnreadableImageError."""
    try:
        with path.open("rb") as file:
            return _decode(file, image_format, get_box or center_box)
    except Exception as error:
        # A damaged file brings any error out of a decoder.
        raise UnreadableImageError(f"the image {path} cannot be read: {error}") from error


def _decode(file: BinaryIO, image_format: ImageFormat, get_box: BoxFunction) -> Images:
    size, mode = image_format.size, _pil_mode(image_format)
    with Image.open(file) as image:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        turned = orientation in _TRANSPOSED_ORIENTATIONS
        width, height = image.size[::-1] if turned else image.size
        left, top, right, bottom = get_box(height, width)
        wanted = (ceil(width * size / (right - left)), ceil(height * size / (bottom - top)))
        whole = image.size
        # Pillow decodes a JPEG straight to a half, a quarter or an eighth of its size where that is still large enough,
        # which torchvision cannot; a JPEG of which all pixels are needed is decoded and resized by torchvision and
        # torch, which take two thirds of Pillow's time.
        image.draft(mode, wanted[::-1] if turned else wanted)
        if image.format == "JPEG" and image.size == whole and orientation == 1 and image.mode in ("L", "RGB"):
            from engine.data.sources import jpeg

            file.seek(0)
            if (pixels := jpeg.decode(file.read(), mode)) is not None:
                return jpeg.resized_crop(pixels, size, (left, top, right, bottom))
        upright = convert_mode(image if orientation == 1 else ImageOps.exif_transpose(image), mode)
        across, down = upright.width / width, upright.height / height
        box = (round(left * across), round(top * down), round(right * across), round(bottom * down))
        return _resized_crop(upright, size, box)


def pil_to_format(image: Image.Image, image_format: ImageFormat, get_box: BoxFunction | None = None) -> Images:
    """An image that is in memory, as `read_image` gives one. Raises ValueError, or what its decoder raises."""
    image = convert_mode(image, _pil_mode(image_format))
    return _resized_crop(image, image_format.size, (get_box or center_box)(image.height, image.width))


def center_box(height: int, width: int) -> Box:
    """The largest square."""
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def crop_images(images: Images, indices: Indices, crop: CropSpec) -> Images:
    """Of N x C x H x W, each image cut and brought to the size of `crop`."""
    kept = ImageFormat(crop.size, images.shape[1], (), ())
    cuts = [partial(crop.box, int(index)) for index in indices]
    return np.stack([pil_to_format(_from_array(pixels), kept, cut) for pixels, cut in zip(images, cuts, strict=True)])


def convert_mode(image: Image.Image, mode: str) -> Image.Image:
    """Grey ("L") or colour ("RGB") of 8 bits; what is transparent is seen on white. Raises ValueError for numbers of
    which nobody knows what is white."""
    image = _to_eight_bits(image)
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        # The colour of a transparent pixel is anything.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """16-bit greys brought to 8 bits with their shades; Pillow itself cuts them off at 255."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, for which no white is defined")
    if not image.mode.startswith("I"):
        return image
    shades = np.asarray(image).astype(np.int64) // 257
    return Image.fromarray(shades.clip(0, 255).astype(np.uint8))


def _pil_mode(image_format: ImageFormat) -> str:
    return "L" if image_format.channels == 1 else "RGB"


def _resized_crop(image: Image.Image, size: int, box: Box) -> Images:
    part = image if box == (0, 0, *image.size) else image.crop(box)
    return _to_array(part.resize((size, size), Image.Resampling.BILINEAR))


def _to_array(image: Image.Image) -> Images:
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _from_array(pixels: Images) -> Image.Image:
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
