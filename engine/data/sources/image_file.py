"""Open image files of any origin: which formats and sizes are accepted, and how many are decoded at the same time.

`engine.data.sources.image` decodes what this module opens, `engine.data.sources.folder` checks the files of a dataset.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from engine.utils.errors import CodedError

# Pillow tries them in this order. Its other formats are rarely used, have no decoder, or run programs: it decodes EPS
# with Ghostscript.
IMAGE_FORMATS = (
    *("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "JPEG2000", "DDS", "DIB", "ICO", "PCX", "SGI"),
    # Not in Pillow before 11.3, which raises KeyError for an unknown format.
    *(("AVIF",) if find_spec("PIL.AvifImagePlugin") else ()),
    # Last, because it has no signature: Pillow identifies some files of other formats as TGA.
    "TGA",
)
# Decoded at the same time in one process. Pillow takes up to 4 bytes per pixel, twice that to convert an image.
MAX_PIXELS_IN_FLIGHT = 1 << 28
# An uncompressed color image of 89 million pixels. A sparse file takes no disk space, but would fill the memory.
MAX_IMAGE_BYTES = 1 << 28

# Pillow warns of images of half the size that it refuses.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class UnusableImageError(CodedError):
    """A file is not an image that gputrain decodes. The message is a noun phrase that says what it is instead."""


class PixelBudget:
    """Bounds the sum of pixels that threads of one process decode at the same time. A larger image is decoded alone."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = self._free = max_pixels
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Wait until this many pixels are free, and hold them."""
        held = min(pixels, self._max_pixels)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= held)
            self._free -= held
        try:
            yield
        finally:
            with self._changed:
                self._free += held
                self._changed.notify_all()


_PIXEL_BUDGET = PixelBudget(MAX_PIXELS_IN_FLIGHT)


def read_image_file(path: Path | str) -> bytes:
    """Return the content of a file. Raises UnusableImageError if no image has its size, and OSError.

    The file is read at once, because its owner can extend or truncate it while it is decoded. Pillow reads a file of
    some formats to its end, and libtiff maps it into memory.
    """
    # Opening a named pipe would wait for a writer. A Python file object would take twice the time.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableImageError("not a regular file", code="not-a-file")
        if status.st_size > MAX_IMAGE_BYTES:
            raise UnusableImageError(
                f"a file of more than {MAX_IMAGE_BYTES >> 20} MiB; reduce its size", code="too-large"
            )
        data = os.read(handle, status.st_size)
        # A network file system may return less.
        while len(data) < status.st_size and (rest := os.read(handle, status.st_size - len(data))):
            data += rest
        return data
    finally:
        os.close(handle)


@contextmanager
def open_image(data: bytes) -> Iterator[Image.Image]:
    """Identify an image by the header of its file, without decoding it. Raises UnusableImageError."""
    try:
        image = Image.open(BytesIO(data), formats=IMAGE_FORMATS)
    except UnidentifiedImageError as error:
        raise _other_file(bytes(data[:16])) from error
    except Image.DecompressionBombError as error:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UnusableImageError(
            f"an image of more than {limit:,} pixels; reduce its size", code="too-large"
        ) from error
    with image:
        yield image


def reserve_pixels(pixels: int) -> AbstractContextManager[None]:
    """Wait while other threads decode too many pixels, then reserve this many in this context."""
    return _PIXEL_BUDGET.reserve(pixels)


@contextmanager
def decoding(image: Image.Image) -> Iterator[None]:
    """Decode an open image in this context. Waits while other threads decode too many pixels. Closes the image."""
    # The image is closed first, because its pixels are in memory as long as the object is open.
    with reserve_pixels(image.width * image.height):
        try:
            yield
        finally:
            image.close()


def decode_error_reason(error: Exception) -> str:
    """Return why an image cannot be read or decoded, without its path."""
    if isinstance(error, MemoryError):
        return "not enough memory"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _other_file(beginning: bytes) -> UnusableImageError:
    """Return the error that says what a file is. Only Pillow's tests of the first 16 bytes run, no other code of a
    format."""
    if not beginning:
        return UnusableImageError("an empty file", code="bad-image")
    # ISO/IEC 23008-12: the brands of HEIC files, which phones write.
    if beginning[4:8] == b"ftyp" and beginning[8:12] in (b"heic", b"heix", b"heim", b"heis", b"mif1"):
        reason = "an image in the format HEIC, which is not supported; convert it to JPEG"
        return UnusableImageError(reason, code="not-supported")
    Image.init()
    # The signatures of BMP and PPM are two letters that a text may begin with, too.
    is_text = not any(byte < ord(" ") and byte not in b"\t\n\r" for byte in beginning)
    for name, (_, accepts) in Image.OPEN.items():
        # A test may fail for a short file.
        with suppress(IndexError, struct.error):
            if accepts is None or not accepts(beginning):
                continue
            if name not in IMAGE_FORMATS:
                reason = f"an image in the format {name}, which is not supported; convert it to PNG"
                return UnusableImageError(reason, code="not-supported")
            if not is_text:
                return UnusableImageError(f"a damaged {name} image", code="bad-image")
    return UnusableImageError("not an image", code="bad-image")
