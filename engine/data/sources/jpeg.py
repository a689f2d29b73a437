"""Decode JPEG files with libjpeg-turbo through simplejpeg, which is faster than Pillow and releases the GIL.

`engine.data.sources.image` calls it for the files whose header `engine.data.sources.jpeg_header` understands.
`engine.data.sources.jpeg_crop` makes the smaller file that is enough for a crop.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.data.sources.base import Box, Images
from engine.data.sources.jpeg_crop import cut_jpeg, skip_rows_below
from engine.data.sources.jpeg_header import JpegHeader
from engine.utils.errors import Problem

# simplejpeg's names of color spaces, by Pillow mode.
_COLOR_SPACES = {"L": "GRAY", "RGB": "RGB"}
# Scales of Pillow's `draft`: 1/8, 1/4, 1/2 and full size.
_DENOMINATORS = (8, 4, 2)
# libjpeg-turbo scales by any number of eighths. For a smaller image, two of them give the same size.
MIN_SCALED_SIDE = 8


def decode(
    data: bytes | memoryview, header: JpegHeader, mode: str, box: Box | None = None, denominator: int = 1
) -> tuple[Images, int, int] | None:
    """Decode a JPEG in mode "L" or "RGB", at the scale 1 / `denominator`, without EXIF rotation.

    Returns the pixels, C x H x W uint8, and the column and row of the first one in the scaled image. With `box`, in
    pixels of the scaled image, other parts of the image may be missing. The pixels are those of Pillow. Returns None if
    simplejpeg is not installed or rejects the file. The caller then decodes with Pillow, which accepts more files.
    """
    if box is not None:
        left, top, right, bottom = box
        full_box = left * denominator, top * denominator, right * denominator, bottom * denominator
        cut = cut_jpeg(data, header, full_box, denominator)
        if cut is None:
            cut = skip_rows_below(data, header, full_box[3], denominator)
        if cut is not None and max(cut.width, cut.height) >= MIN_SCALED_SIDE:
            pixels = _decode(cut.data, cut.width, cut.height, mode, denominator, strict=not cut.has_more_rows)
            if pixels is not None:
                return pixels, cut.left // denominator, cut.top // denominator
    pixels = _decode(data, header.width, header.height, mode, denominator)
    return None if pixels is None else (pixels, 0, 0)


def _decode(
    data: bytes | memoryview | bytearray, width: int, height: int, mode: str, denominator: int, *, strict: bool = True
) -> Images | None:
    """Decode a JPEG of this size. With `strict`, reject damage for which libjpeg-turbo substitutes gray pixels and only
    warns; without, accept it as Pillow does."""
    simplejpeg = _load_simplejpeg()
    if simplejpeg is None:
        return None
    min_width, min_height = (0, 0) if denominator == 1 else (-(-width // denominator), -(-height // denominator))
    try:
        pixels: Images = simplejpeg.decode_jpeg(
            data, _COLOR_SPACES[mode], min_height=min_height, min_width=min_width, strict=strict
        )
    except ValueError:
        return None
    return pixels.transpose(2, 0, 1)


def choose_denominator(header: JpegHeader, min_width: int, min_height: int) -> int:
    """Return the denominator of the smallest scale that keeps the image at least this large, as Pillow's `draft`."""
    if max(header.width, header.height) < MIN_SCALED_SIDE:
        return 1
    scale = min(header.width // min_width, header.height // min_height)
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
