"""Pictures of a page as data URIs."""

from __future__ import annotations

import base64
import io
from typing import NamedTuple

import numpy as np
from PIL import Image

from engine.runs.evaluations import ConfusionCounts, row_shares

# A cell of the matrix has at least one pixel, and the whole matrix about this many a side.
MATRIX_PIXELS = 900
_LEVELS, _MIN_LEVEL = 127, 10
# White to the blue and the vermilion of Okabe and Ito.
_RIGHT_COLOR, _WRONG_COLOR = (0, 114, 178), (213, 94, 0)


class Picture(NamedTuple):
    """A picture: its data URI and its size in pixels."""

    uri: str
    width: int
    height: int


def matrix_picture(counts: ConfusionCounts) -> Picture:
    """Return a confusion matrix as a picture: right predictions are blue, mistakes vermilion, true classes in rows.

    A cell is as dark as the square root of its share of the true class, which makes rare mistakes visible."""
    shares = np.sqrt(row_shares(counts))
    levels = np.where(counts > 0, np.maximum(np.rint(_LEVELS * shares), _MIN_LEVEL), 0).astype(np.int64)
    indices = levels + np.where(np.eye(len(counts), dtype=bool), 0, _LEVELS + 1)
    scale = max(MATRIX_PIXELS // len(counts), 1)
    pixels = np.repeat(np.repeat(indices.astype(np.uint8), scale, 0), scale, 1)
    image = Image.fromarray(pixels, "P")
    shades = np.linspace(255, [_RIGHT_COLOR, _WRONG_COLOR], _LEVELS + 1, axis=1)
    image.putpalette(np.rint(shades).astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "png", optimize=True)
    return Picture(data_uri("png", buffer.getvalue()), *image.size)


def data_uri(kind: str, data: bytes) -> str:
    """Return an image as a data URI. `kind` is the subtype of its MIME type, such as `png`."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
