"""Decode JPEG files with libjpeg-turbo through simplejpeg, which is faster than Pillow and releases the GIL.

`engine.data.sources.image` calls it, and decodes with Pillow what this module does not decode.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from PIL import ExifTags

from engine.data.sources.base import Images
from engine.data.sources.image_file import open_image
from engine.utils.errors import Problem

# simplejpeg's names of color spaces, by Pillow mode, and those that it decodes to both.
_COLOR_SPACES = {"L": "GRAY", "RGB": "RGB"}
_DECODED_SPACES = ("Gray", "YCbCr", "RGB")
# Scales of Pillow's `draft`: 1/8, 1/4, 1/2 and full size.
_DENOMINATORS = (8, 4, 2)
# libjpeg-turbo scales by any number of eighths. For a smaller image, two of them give the same size.
MIN_SCALED_SIDE = 8
_START_OF_IMAGE, _START_OF_SCAN = b"\xff\xd8", b"\xff\xda"
# Segments of an image that may be rotated, and of a file with several images.
_SPECIAL_SEGMENTS = (b"Exif\0\0", b"tiff:Orientation", b"MPF\0")


def read_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a JPEG file that `decode` decodes as Pillow does.

    None for other files, such as rotated images and CMYK, and if simplejpeg is not installed. Takes a few microseconds
    unless the file has Exif data; Pillow's `Image.open` takes 100 to 200, and holds the GIL."""
    simplejpeg = _load_simplejpeg()
    if simplejpeg is None or not data.startswith(_START_OF_IMAGE):
        return None
    header = data[: data.find(_START_OF_SCAN)]
    if any(segment in header for segment in _SPECIAL_SEGMENTS):
        with open_image(data) as image:
            if image.format != "JPEG" or image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
                return None
    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (width, height) if color_space in _DECODED_SPACES else None


def decode(data: bytes, mode: str, width: int, height: int, denominator: int = 1) -> Images | None:
    """Decode a JPEG of this size in mode "L" or "RGB", C x H x W uint8, at the scale 1 / `denominator`.

    The pixels are those of Pillow. Returns None if simplejpeg rejects the file, as it does damage for which
    libjpeg-turbo substitutes gray pixels. The caller then decodes with Pillow, which accepts more files.
    """
    min_width, min_height = (0, 0) if denominator == 1 else (-(-width // denominator), -(-height // denominator))
    try:
        pixels: Images = _load_simplejpeg().decode_jpeg(
            data, _COLOR_SPACES[mode], min_height=min_height, min_width=min_width, strict=True
        )
    except ValueError:
        return None
    return pixels.transpose(2, 0, 1)


def choose_denominator(width: int, height: int, min_width: int, min_height: int) -> int:
    """Return the denominator of the smallest scale that keeps the image at least this large, as Pillow's `draft`."""
    if max(width, height) < MIN_SCALED_SIDE:
        return 1
    scale = min(width // min_width, height // min_height)
    return next((denominator for denominator in _DENOMINATORS if denominator <= scale), 1)


def decoder_warning() -> Problem | None:
    """Return a warning if JPEG files are decoded by Pillow because simplejpeg cannot be imported."""
    if _load_simplejpeg() is not None:
        return None
    reason = (
        "simplejpeg cannot be imported, so Pillow decodes JPEG files, which takes about twice the time: "
        "pip install simplejpeg"
    )
    return Problem("", reason, code="not-installed")


@cache
def _load_simplejpeg() -> Any:
    """Return the module, or None if it cannot be imported."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
