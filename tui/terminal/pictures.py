"""Draws an image in half blocks: each character cell shows two pixels, so any terminal with colors shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.color import Color
from rich.segment import Segment
from rich.style import Style

if TYPE_CHECKING:
    from PIL.Image import Image

# Images up to this size are enlarged without smoothing: their pixels are what the network sees.
MAX_PIXEL_ART_SIDE = 64
HALF_BLOCK = "▀"


@dataclass(frozen=True)
class DrawnPicture:
    """The lines of a picture, each `columns` cells wide."""

    columns: int
    lines: tuple[tuple[Segment, ...], ...]


def draw_picture(image: Image, columns: int, rows: int) -> DrawnPicture:
    """Draw an RGB image as large as fits into `columns` x `rows` cells, in its proportions."""
    import numpy as np
    from PIL import Image as PillowImage

    width, height, is_smooth = fit_picture(image.width, image.height, columns, rows)
    resampling = PillowImage.Resampling.LANCZOS if is_smooth else PillowImage.Resampling.NEAREST
    pixels = np.asarray(image.resize((width, height), resampling)).tolist()
    lines = []
    for y in range(0, height, 2):
        pairs = zip(pixels[y], pixels[min(y + 1, height - 1)], strict=True)
        cells = [Segment(HALF_BLOCK, _style(upper, lower)) for upper, lower in pairs]
        # Neighbors of one color become one segment: a small image of large pixels takes a tenth of the bytes.
        lines.append(tuple(Segment.simplify(cells)))
    return DrawnPicture(width, tuple(lines))


def fit_picture(width: int, height: int, columns: int, rows: int) -> tuple[int, int, bool]:
    """Return the size in half cells in which to draw an image of width x height pixels, and whether to smooth it."""
    factor = min(columns // width, 2 * rows // height)
    if factor and max(width, height) <= MAX_PIXEL_ART_SIDE:
        return factor * width, factor * height, False
    scale = min(columns / width, 2 * rows / height)
    return min(max(round(width * scale), 1), columns), min(max(round(height * scale / 2), 1), rows) * 2, True


def _style(upper: Sequence[int], lower: Sequence[int]) -> Style:
    return Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))
