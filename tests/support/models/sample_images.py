"""Small images of the kinds on which programs disagree: transparency, palettes, 16 bits, EXIF, CMYK and odd sizes.

Tests read them with preprocess.py and with `read_image`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, features

HEIGHT, WIDTH = 60, 44
ORIENTATIONS = range(1, 9)


def write_sample_images(folder: Path) -> Iterator[Path]:
    """Write the images to a folder and yield their paths."""
    colors = _pattern(HEIGHT, WIDTH)
    rgb = Image.fromarray(colors)
    alpha = Image.fromarray(np.repeat(np.linspace(0, 255, WIDTH, dtype=np.uint8)[None], HEIGHT, 0))
    with_alpha = rgb.copy()
    with_alpha.putalpha(alpha)
    grey_alpha = rgb.convert("L")
    grey_alpha.putalpha(alpha)
    sixteen_bits = Image.fromarray(np.linspace(0, 65535, HEIGHT * WIDTH).astype(np.uint16).reshape(HEIGHT, WIDTH))
    palette = rgb.quantize(16)
    images = {
        "rgb.png": rgb,
        "grey.png": rgb.convert("L"),
        "bilevel.png": rgb.convert("1"),
        "rgba.png": with_alpha,
        "grey-alpha.png": grey_alpha,
        "16-bit.png": sixteen_bits,
        "palette.png": palette,
        "one-pixel-wide.png": rgb.crop((0, 0, 1, HEIGHT)),
        "wide.png": Image.fromarray(_pattern(20, 301)),
        "rgb.jpg": rgb,
        "grey.jpg": rgb.convert("L"),
        "cmyk.jpg": rgb.convert("CMYK"),
    }
    if features.check("webp"):
        images["rgba.webp"] = with_alpha
    for name, image in images.items():
        image.save(folder / name)
        yield folder / name
    palette.save(folder / "transparent-palette.png", transparency=3)
    yield folder / "transparent-palette.png"
    for orientation in ORIENTATIONS:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        rgb.save(folder / f"exif-{orientation}.jpg", exif=exif)
        yield folder / f"exif-{orientation}.jpg"


def _pattern(height: int, width: int) -> NDArray[np.uint8]:
    """Return smooth colors without a symmetry, height x width x 3."""
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [128 + 100 * np.sin(rows / 9 + shift) * np.cos(columns / (13 + 2 * shift)) + rows for shift in range(3)]
    return np.stack(channels, -1).clip(0, 255).astype(np.uint8)
