"""Pictures of inspected images for people: the image file, or the thumbnail in the inspection. Imports no torch.

Called by the screen and by reports. `engine.train.inference.inspect` writes the inspection.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
from PIL import Image

from engine.base.files import path_of_descriptor
from engine.runs.folder import RunFolder
from engine.runs.inspection import InspectedImage, Inspection
from engine.train.data.sources.base import UnreadableImageError
from engine.train.data.sources.image import UnusableImageError, load_picture, named_image, read_image_file

# The longer edge of a preview.
MAX_PREVIEW_SIDE = 1024


def load_preview(run: RunFolder, inspection: Inspection, image: InspectedImage) -> Image.Image:
    """Return the picture of an inspected image: upright, RGB or grayscale, at most MAX_PREVIEW_SIDE pixels a side.

    If other users can change the run, no link is followed, and everybody or the owner of the run must be able to read
    the image: a report would pass on a private photo. Raises UnreadableImageError with one sentence.
    """
    if (pixels := inspection.thumbnail(image.row)) is not None:
        return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    if inspection.info.root is None or image.path is None:
        reason = "the inspection has pictures of the worst images only"
        raise UnreadableImageError(f"there is no picture of {image.name}: {reason}", code="not-recorded")
    path = Path(inspection.info.root, image.path)
    with named_image(lambda: str(path)):
        is_foreign = run.foreign_reason() is not None
        data = _read_foreign_file(path, run.status().st_uid) if is_foreign else read_image_file(path)
        picture = load_picture(data, MAX_PREVIEW_SIDE)
        picture.thumbnail((MAX_PREVIEW_SIDE, MAX_PREVIEW_SIDE), Image.Resampling.BILINEAR)
        return picture


def _read_foreign_file(path: Path, owner: int) -> bytes:
    """Return the content of a file that is behind no link, and public or of the user `owner`.

    Raises UnusableImageError and OSError.
    """
    # Opening a device for reading could have an effect.
    handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        opened, status = path_of_descriptor(handle), os.fstat(handle)
        # A check before the file is opened would miss a folder that is replaced by a link in between.
        if stat.S_ISLNK(status.st_mode) or opened.readlink() != path:
            raise UnusableImageError("behind a link", code="foreign-owner")
        is_public = status.st_mode & stat.S_IROTH and all(each.stat().st_mode & stat.S_IXOTH for each in path.parents)
        if status.st_uid != owner and not is_public:
            raise UnusableImageError("a private file of another user than the owner of the run", code="foreign-owner")
        return read_image_file(opened)
    finally:
        os.close(handle)
