"""Pictures of inspected images for people: the image file, or the thumbnail in the inspection. Imports no torch.

Called by the screen and by reports. `engine.inference.inspect` writes the inspection.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
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
from engine.utils.files import path_of_descriptor

# The longer edge of a preview.
MAX_PREVIEW_SIDE = 1024


def load_preview(run: RunFolder, inspection: Inspection, image: InspectedImage) -> Image.Image:
    """Return the picture of an inspected image: upright, RGB or grayscale, at most MAX_PREVIEW_SIDE pixels a side.

    If other users can change the run, its image files are opened without following any link, and only if everybody or
    the owner of the run can read them: a report would pass on a private photo. Raises UnreadableImageError with one
    sentence.
    """
    if (pixels := inspection.thumbnail(image.row)) is not None:
        return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    if inspection.info.root is None or image.path is None:
        reason = "the inspection has pictures of the worst images only"
        raise UnreadableImageError(f"there is no picture of {image.name}: {reason}", code="not-recorded")
    path = Path(inspection.info.root, image.path)
    try:
        with ExitStack() as opened:
            if run.foreign_reason() is None:
                return _decode(path)
            if ".." in path.parts or not path.is_absolute():
                raise UnusableImageError("no path below the folder of the dataset", code="invalid-value")
            handle = _open_without_links(path, run.path.stat().st_uid)
            opened.callback(os.close, handle)
            return _decode(path_of_descriptor(handle))
    except UnusableImageError as error:
        raise UnreadableImageError(f"the image {path} cannot be shown: it is {error}", code=error.code) from error
    except Exception as error:
        # Decoders raise arbitrary exceptions for a damaged file.
        raise UnreadableImageError(
            f"the image {path} cannot be shown: {decode_error_reason(error)}", code="bad-image"
        ) from error


def _open_without_links(path: Path, owner: int) -> int:
    """Return a descriptor of a file, which is not opened for reading. Raises OSError if any part of its path is a link,
    and UnusableImageError if the file is neither readable for everybody nor of the user `owner`.

    Opening a device could have an effect; what the descriptor leads to is checked before it is read.
    """
    *folders, name = path.parts
    is_public = True
    folder = os.open(folders[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders[1:]:
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
            is_public = is_public and bool(os.fstat(folder).st_mode & stat.S_IXOTH)
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    if not path_of_descriptor(handle).is_file():
        os.close(handle)
        raise UnusableImageError("not a regular file", code="not-a-file")
    status = os.fstat(handle)
    if status.st_uid != owner and not (is_public and status.st_mode & stat.S_IROTH):
        os.close(handle)
        raise UnusableImageError("a private file of another user than the owner of the run", code="foreign-owner")
    return handle


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
