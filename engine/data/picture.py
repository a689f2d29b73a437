"""Single images as Pillow has them: read, turned upright, cut, and brought to a size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

from engine.data.sampler import Indices
from engine.data.source import Box, Crop, ImageFormat, Images, UnreadableImageError

# Orientations of EXIF by which height and width change places.
_TURNED = (5, 6, 7, 8)
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
# What to cut out of an image of a height and a width.
Cut = Callable[[int, int], Box]


def read_image(path: Path, image_format: ImageFormat, cut: Cut | None = None) -> Images:
    """The image as C x H x W: upright, its shorter side brought to the size and its middle cut out, or that which `cut`
    names cut out of the whole and brought to the size. Raises UnreadableImageError."""
    size, mode = image_format.size, _mode(image_format)
    try:
        with Image.open(path) as file:
            turned = file.getexif().get(ExifTags.Base.Orientation) in _TURNED
            width, height = file.size[::-1] if turned else file.size
            left, top, right, bottom = cut(height, width) if cut else (0, 0, width, height)
            if cut:
                wanted = (ceil(width * size / (right - left)), ceil(height * size / (bottom - top)))
            else:
                wanted = (size, size)
            # JPEG decodes straight to a smaller image where that is still large enough.
            file.draft(mode, wanted[::-1] if turned else wanted)
            image = plain(ImageOps.exif_transpose(file), mode)
    except Exception as error:
        # A damaged file brings any error out of a decoder.
        raise UnreadableImageError(f"the image {path} cannot be read: {error}") from error
    if cut is None:
        return _fitted(image, size)
    across, down = image.width / width, image.height / height
    return _cut(image, size, (round(left * across), round(top * down), round(right * across), round(bottom * down)))


def to_format(image: Image.Image, image_format: ImageFormat, cut: Cut | None = None) -> Images:
    """An image that is in memory, as `read_image` gives one. Raises ValueError, or what its decoder raises."""
    image = plain(image, _mode(image_format))
    if cut is None:
        return _fitted(image, image_format.size)
    return _cut(image, image_format.size, cut(image.height, image.width))


def cut_out(images: Images, indices: Indices, crop: Crop) -> Images:
    """Of N x C x H x W, each image cut and brought to the size of `crop`."""
    kept = ImageFormat(crop.size, images.shape[1], (), ())
    cuts = [partial(crop.box, int(index)) for index in indices]
    return np.stack([to_format(_image(pixels), kept, cut) for pixels, cut in zip(images, cuts, strict=True)])


def plain(image: Image.Image, mode: str) -> Image.Image:
    """Grey ("L") or colour ("RGB") of 8 bits; what is transparent is seen on white. Raises ValueError for numbers of
    which nobody knows what is white."""
    image = _to_eight_bits(image)
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        # The colour of a transparent pixel is anything.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """16-bit greys brought to 8 bits with their shades; Pillow itself cuts them off at 255."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, for which no white is defined")
    if not image.mode.startswith("I"):
        return image
    shades = np.asarray(image).astype(np.int64) // 257
    return Image.fromarray(shades.clip(0, 255).astype(np.uint8))


def _mode(image_format: ImageFormat) -> str:
    return "L" if image_format.channels == 1 else "RGB"


def _fitted(image: Image.Image, size: int) -> Images:
    return _pixels(ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR))


def _cut(image: Image.Image, size: int, box: Box) -> Images:
    return _pixels(image.crop(box).resize((size, size), Image.Resampling.BILINEAR))


def _pixels(image: Image.Image) -> Images:
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _image(pixels: Images) -> Image.Image:
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
