"""Draws an image with textual-image for the graphics of the terminal: half blocks, Kitty graphics or Sixel.

Drawing takes up to a second for Sixel, so `tui.pollers.picture` does it in a thread. textual-image queries the terminal
when it is imported, and Kitty images are written to stdout while they are rendered; both are kept from the terminal.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.segment import Segment

from tui.graphics import Graphics, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image
    from textual_image.renderable import HalfcellImage, SixelImage, TGPImage

# Bounds what is sent over a slow connection. A Kitty terminal enlarges the image, Sixel is drawn smaller.
MAX_SIDE: dict[Protocol, int] = {"kitty": 640, "sixel": 640, "blocks": 640}
# Images up to this size are enlarged without smoothing: their pixels are what the network sees.
MAX_PIXEL_ART_SIDE = 64
SIXEL_START = "\x1bP"
_stdout_lock = threading.Lock()


@dataclass(frozen=True)
class DrawnPicture:
    """A picture of `columns` x `rows` cells.

    `lines` are its cells; with Sixel they are blank, and `overlay` is written over them. A Kitty terminal gets `setup`
    before them, and `cleanup` when the picture is no longer shown.
    """

    columns: int
    rows: int
    lines: tuple[tuple[Segment, ...], ...]
    setup: str = ""
    overlay: str = ""
    cleanup: str = ""


@dataclass(frozen=True)
class PictureSize:
    """The size of a picture in cells, and the size in pixels to which its image is scaled."""

    columns: int
    rows: int
    width: int
    height: int
    is_smooth: bool


def fit_picture(width: int, height: int, columns: int, rows: int, graphics: Graphics) -> PictureSize:
    """Return the largest size for an image of width x height pixels in `columns` x `rows` cells, in its proportions."""
    cell_width, cell_height = graphics.cell
    is_pixel_art = max(width, height) <= MAX_PIXEL_ART_SIDE
    if graphics.protocol == "blocks" and is_pixel_art and 0.8 <= 2 * cell_width / cell_height <= 1.25:
        # Each pixel becomes a square of whole half cells.
        factor = min(columns // width, 2 * rows // height)
        if factor:
            return PictureSize(factor * width, -(-factor * height // 2), factor * width, factor * height, False)
    scale = min(columns * cell_width / width, rows * cell_height / height)
    if graphics.protocol == "sixel":
        scale = min(scale, MAX_SIDE["sixel"] / max(width, height))
    used_columns = min(max(round(width * scale / cell_width), 1), columns)
    used_rows = min(max(round(height * scale / cell_height), 1), rows)
    if graphics.protocol == "blocks":
        return PictureSize(used_columns, used_rows, used_columns, 2 * used_rows, True)
    pixels = (used_columns * cell_width, used_rows * cell_height)
    if graphics.protocol == "kitty":
        reduction = min(MAX_SIDE["kitty"] / max(pixels), 1.0)
        pixels = (max(round(pixels[0] * reduction), 1), max(round(pixels[1] * reduction), 1))
    return PictureSize(used_columns, used_rows, *pixels, not is_pixel_art)


def draw_picture(image: Image, columns: int, rows: int, graphics: Graphics) -> DrawnPicture:
    """Draw an RGB image as large as fits into `columns` x `rows` cells."""
    from PIL import Image as PillowImage

    size = fit_picture(image.width, image.height, columns, rows, graphics)
    resampling = PillowImage.Resampling.LANCZOS if size.is_smooth else PillowImage.Resampling.NEAREST
    scaled = image.resize((size.width, size.height), resampling)
    if graphics.protocol == "blocks" and scaled.height < 2 * size.rows:
        padded = PillowImage.new("RGB", (scaled.width, 2 * size.rows), scaled.getpixel((0, scaled.height - 1)))
        padded.paste(scaled)
        scaled = padded
    with _stdout_lock, _captured_stdout() as written:
        renderable = _make_renderable(scaled, size, graphics)
        segments = _render(renderable, size)
    number = getattr(renderable, "terminal_image_id", None)
    # textual-image itself deletes all pictures from the screen, and none from the memory of the terminal.
    cleanup = f"\x1b_Ga=d,d=I,i={number},q=2\x1b\\" if number is not None else ""
    if graphics.protocol == "sixel":
        overlay = "".join(segment.text for segment in segments if segment.text.startswith(SIXEL_START))
        blank = (Segment(" " * size.columns),)
        return DrawnPicture(size.columns, size.rows, (blank,) * size.rows, overlay=overlay)
    # Neighbors of one color become one segment: a small image of large pixels takes a tenth of the bytes.
    lines = tuple(tuple(Segment.simplify(line)) for line in Segment.split_lines(segments))[: size.rows]
    return DrawnPicture(size.columns, size.rows, lines, setup=written.getvalue(), cleanup=cleanup)


def _make_renderable(image: Image, size: PictureSize, graphics: Graphics) -> HalfcellImage | SixelImage | TGPImage:
    """Import textual-image, which must not find the terminal, and make its renderable for a scaled image."""
    from textual_image import _terminal, renderable

    # The cached result of its own query. Later versions, for Python 3.12 and later, ask for the protocol with it.
    terminal: Any = _terminal
    cell = terminal.CellSize(size.width // size.columns, size.height // size.rows)
    if hasattr(terminal, "probe_terminal"):
        terminal.probe_terminal._result = terminal.TerminalCapabilities(cell, sixel=False, tgp=False)
    else:
        terminal.get_cell_size._result = cell
    if graphics.protocol == "kitty":
        return renderable.TGPImage(image, size.columns, size.rows)
    if graphics.protocol == "sixel":
        return renderable.SixelImage(image, size.columns, size.rows)
    return renderable.HalfcellImage(image, size.columns, size.rows)


def _render(renderable: HalfcellImage | SixelImage | TGPImage, size: PictureSize) -> list[Segment]:
    console = Console(file=io.StringIO(), width=size.columns, height=size.rows, force_terminal=True, color_system=None)
    return list(console.render(renderable))


@contextmanager
def _captured_stdout() -> Iterator[io.StringIO]:
    """Replace the stdout of the interpreter, which nothing else uses while Textual draws on stderr."""
    written, stdout = io.StringIO(), sys.__stdout__
    sys.__stdout__ = written  # type: ignore[misc, assignment]
    try:
        yield written
    finally:
        sys.__stdout__ = stdout  # type: ignore[misc]
