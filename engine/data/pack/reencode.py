"""Re-encode an image for tar shards as a JPEG that loads fast: small, baseline and upright."""

from __future__ import annotations

from io import BytesIO
from typing import Annotated

from PIL import Image

from engine.data.sources.image import convert_mode, natural_mode, open_image, rotate_upright
from engine.utils.codec import Meta, Record

DEFAULT_QUALITY = 90


class Encoding(Record, frozen=True, kw_only=True):
    """How images are re-encoded. Without `max_side`, at full scale."""

    max_side: Annotated[int, Meta(gt=0, le=1 << 20)] | None
    quality: Annotated[int, Meta(ge=1, le=100)]


def reencode(data: bytes, encoding: Encoding) -> bytes:
    """Return an image as a JPEG: grayscale or RGB, transparent pixels on white, without EXIF data and color profile.

    The training ignores color profiles. Raises UnusableImageError, and the errors of Pillow's decoders.
    """
    with open_image(data) as image:
        upright = rotate_upright(image)
        picture = convert_mode(upright, natural_mode(upright))
        longer = max(picture.size)
        if encoding.max_side is not None and longer > encoding.max_side:
            width, height = (max(round(side * encoding.max_side / longer), 1) for side in picture.size)
            picture = picture.resize((width, height), Image.Resampling.LANCZOS)
        buffer = BytesIO()
        # An empty comment replaces the comment of the original.
        picture.save(buffer, "JPEG", quality=encoding.quality, comment=b"")
    return buffer.getvalue()
