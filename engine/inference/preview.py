"""Pictures of inspected images for people: the image file, or the thumbnail in the inspection. Imports no torch.

Called by the screen and by reports. `engine.inference.inspect` writes the inspection.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from engine.data.sources.base import UnreadableImageError
from engine.data.sources.image import convert_mode, natural_mode, rotate_upright
from engine.data.sources.image_file import (
    UnusableImageError,
    decode_error_reason,
    decoding,
    open_image,
    read_image_file,
)
from engine.runs.folder import RunFolder
from engine.runs.inspection import InspectedImage, Inspection

# The longer edge of a preview.
MAX_PREVIEW_SIDE = 1024


def load_preview(run: RunFolder, inspection: Inspection, image: InspectedImage) -> Image.Image:
    """Return the picture of an inspected image: upright, RGB or grayscale, at most MAX_PREVIEW_SIDE pixels a side.

    No link is followed if other users can change the run. Raises UnreadableImageError with one sentence.
    """
    if (pixels := inspection.thumbnail(image.row)) is not None:
        return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    if inspection.info.root is None or image.path is None:
        reason = "the inspection has pictures of the worst images only"
        raise UnreadableImageError(f"there is no picture of {image.name}: {reason}", code="not-recorded")
    path = Path(inspection.info.root, image.path)
    try:
        if run.foreign_reason() is not None and path.resolve() != path:
            raise UnusableImageError("behind a link", code="foreign-owner")
        return _decode(path)
    except Exception as error:
        # Decoders raise arbitrary exceptions for a damaged file.
        reason = f"it is {error}" if isinstance(error, UnusableImageError) else decode_error_reason(error)
        raise UnreadableImageError(f"the image {path} cannot be shown: {reason}", code="bad-image") from error


def _decode(path: Path) -> Image.Image:
    """Return the picture of a file. Raises UnusableImageError, OSError, and the errors of Pillow's decoders."""
    with open_image(read_image_file(path)) as image:
        # Decodes a large JPEG at 1/2, 1/4 or 1/8 scale.
        image.draft("RGB", (MAX_PREVIEW_SIDE, MAX_PREVIEW_SIDE))
        with decoding(image):
            upright = rotate_upright(image)
            picture = convert_mode(upright, natural_mode(upright))
            if picture is image:
                # The original is closed after it is decoded.
                picture = image.copy()
            picture.thumbnail((MAX_PREVIEW_SIDE, MAX_PREVIEW_SIDE), Image.Resampling.BILINEAR)
            return picture
