"""Open and decode image files of any origin, one at a time: accepted formats and sizes, EXIF orientation, colors.

simplejpeg decodes ordinary JPEG files and torch resizes them, which is faster than Pillow and releases the GIL. Pillow
does all others. `engine.train.data.sources.formats` plans crop and resize, `engine.train.data.sources.folder` checks
the files of a dataset.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from engine.base.errors import CodedError
from engine.train.data.sampler import Indices
from engine.train.data.sources.formats import ImageFormat, Preprocessing, ResizePlan

# uint8, or float32 for user datasets whose items are floating-point tensors, see `ImageFormat.dtype`.
Images = NDArray[Any]

# Pillow tries them in this order. Its other formats are rarely used, have no decoder, or run programs: it decodes EPS
# with Ghostscript.
IMAGE_FORMATS = (
    *("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "JPEG2000", "DDS", "DIB", "ICO", "PCX", "SGI"),
    # Not in Pillow before 11.3, which raises KeyError for an unknown format.
    *(("AVIF",) if find_spec("PIL.AvifImagePlugin") else ()),
    # Last, because it has no signature: Pillow identifies some files of other formats as TGA.
    "TGA",
)
# Larger images are decoded one at a time in a process: Pillow takes up to 4 bytes per pixel, twice that to convert one.
MAX_PIXELS_TOGETHER = 1 << 25
_LARGE_IMAGE = threading.Lock()
# An uncompressed color image of 89 million pixels. A sparse file takes no disk space, but would fill the memory.
MAX_IMAGE_BYTES = 1 << 28

# The greatest 16-bit value, 65,535, becomes 255.
SIXTEEN_BIT_DIVISOR = 257
ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
# EXIF orientations that swap height and width.
_TRANSPOSED_ORIENTATIONS = (5, 6, 7, 8)
# simplejpeg's names of color spaces, by Pillow mode, and those that it decodes to both.
_COLOR_SPACES = {"L": "GRAY", "RGB": "RGB"}
_DECODED_SPACES = ("Gray", "YCbCr", "RGB")
# Scales of Pillow's `draft`: 1/8, 1/4, 1/2 and full size.
_DENOMINATORS = (8, 4, 2)
# libjpeg-turbo scales by any number of eighths. For a smaller image, two of them give the same size.
MIN_SCALED_SIDE = 8
_START_OF_IMAGE, _START_OF_SCAN = b"\xff\xd8", b"\xff\xda"
# Segments of an image that may be rotated, and of a file with several images.
_SPECIAL_SEGMENTS = (b"Exif\0\0", b"tiff:Orientation", b"MPF\0")


# Pillow warns of images of half the size that it refuses.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class UnusableImageError(CodedError):
    """A file is not an image that gputrain decodes. The message is a noun phrase that says what it is instead."""


class UnreadableImageError(CodedError):
    """An image cannot be read or decoded. The message names it."""

    code = "bad-image"


@contextmanager
def named_image(name: Callable[[], str]) -> Iterator[None]:
    """Raise any exception of reading and decoding, as of a damaged file, as an UnreadableImageError that names the
    image."""
    try:
        yield
    except Exception as error:
        reason = f"it is {error}" if isinstance(error, UnusableImageError) else decode_error_reason(error)
        raise UnreadableImageError(f"the image {name()} cannot be read: {reason}") from error


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
    """Identify an image by the header of its file, without decoding it. Raises UnusableImageError.

    Waits while another thread has a large image open, whose pixels are in memory as long as the object is.
    """
    try:
        image = Image.open(BytesIO(data), formats=IMAGE_FORMATS)
    except UnidentifiedImageError as error:
        raise _other_file(bytes(data[:16])) from error
    except Image.DecompressionBombError as error:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UnusableImageError(
            f"an image of more than {limit:,} pixels; reduce its size", code="too-large"
        ) from error
    with _LARGE_IMAGE if prod(image.size) > MAX_PIXELS_TOGETHER else nullcontext(), image:
        yield image


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


def read_image(path: Path, image_format: ImageFormat) -> Images:
    """Read an image file as the input of an evaluation, C x val_size x val_size uint8. Raises UnreadableImageError."""
    preprocessing = image_format.preprocessing(training=False)
    pixels = empty_images(image_format.channels, preprocessing.size, preprocessing.size)
    with named_image(lambda: str(path)):
        decode_into(pixels, read_image_file(path), preprocessing)
    return pixels


def load_picture(data: bytes, min_side: int = 0) -> Image.Image:
    """Decode the content of an image file for people: upright, RGB or grayscale, transparent pixels on white.

    With `min_side`, a large JPEG is decoded at 1/2, 1/4 or 1/8 scale, with sides of at least so many pixels. Raises
    UnusableImageError, and the errors of Pillow's decoders."""
    with open_image(data) as image:
        if min_side:
            image.draft("RGB", (min_side, min_side))
        upright = rotate_upright(image)
        picture = convert_mode(upright, natural_mode(upright))
        # The original is closed after it is decoded.
        return picture.copy() if picture is image else picture


def empty_images(*shape: int, dtype: str = "uint8") -> Images:
    """Return uninitialized images, ... x C x H x W, with the channels last in memory."""
    *counts, channels, height, width = shape
    return np.moveaxis(np.empty((*counts, height, width, channels), dtype), -1, -3)


def decode_into(out: Images, data: bytes, preprocessing: Preprocessing, index: int = 0) -> None:
    """Decode the content of an image file, rotate it according to EXIF, and crop and resize it to `out`, C x size x
    size uint8. `index` is that of the image in its part. Raises any exception for a damaged file."""
    mode, size = _mode(len(out)), read_jpeg_size(data)
    if size is not None and prod(size) <= MAX_PIXELS_TOGETHER:
        width, height = size
        plan, denominator = preprocessing.plan(index, height, width), 1
        if preprocessing.draft:
            denominator = choose_denominator(width, height, *plan.min_source_size(height, width))
        if denominator > 1:
            plan = plan.scaled(-(-width // denominator) / width, -(-height // denominator) / height)
        if (pixels := decode_jpeg(data, mode, width, height, denominator)) is not None:
            if plan.interpolation != "bilinear" or plan.is_elongated:
                out[:] = _apply(plan, _from_array(pixels))
                return
            # Importing torch takes a second, and not every process that reads images needs it.
            from engine.train.data.augment.batch_ops import resize_into

            resize_into(pixels, plan, out)
            return
    with open_image(data) as image:
        # Rotated images have other edges. Draft decodes a JPEG at 1/2, 1/4 or 1/8 scale if that is large enough.
        swaps_axes = image.getexif().get(ExifTags.Base.Orientation, 1) in _TRANSPOSED_ORIENTATIONS
        width, height = image.size[::-1] if swaps_axes else image.size
        plan = preprocessing.plan(index, height, width)
        min_size = plan.min_source_size(height, width) if preprocessing.draft else (width, height)
        image.draft(mode, min_size[::-1] if swaps_axes else min_size)
        upright = convert_mode(rotate_upright(image), mode)
        out[:] = _apply(plan.scaled(upright.width / width, upright.height / height), upright)


def read_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a JPEG file that `decode_jpeg` decodes as Pillow does.

    None for other files, such as rotated images and CMYK. Takes a few microseconds
    unless the file has Exif data; Pillow's `Image.open` takes 100 to 200, and holds the GIL."""
    if not data.startswith(_START_OF_IMAGE):
        return None
    # Not with gputrain's core, which re-encodes and shows images.
    import simplejpeg

    header = data[: data.find(_START_OF_SCAN)]
    if any(segment in header for segment in _SPECIAL_SEGMENTS):
        with open_image(data) as image:
            if image.format != "JPEG" or image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
                return None
    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (width, height) if color_space in _DECODED_SPACES else None


def decode_jpeg(data: bytes, mode: str, width: int, height: int, denominator: int = 1) -> Images | None:
    """Decode a JPEG of this size in mode "L" or "RGB", C x H x W uint8, at the scale 1 / `denominator`.

    The pixels are those of Pillow. Returns None if simplejpeg rejects the file, as it does damage for which
    libjpeg-turbo substitutes gray pixels. The caller then decodes with Pillow, which accepts more files.
    """
    min_width, min_height = (0, 0) if denominator == 1 else (-(-width // denominator), -(-height // denominator))
    import simplejpeg

    try:
        pixels: Images = simplejpeg.decode_jpeg(
            data, _COLOR_SPACES[mode], min_height=min_height, min_width=min_width, strict=True
        )
    except ValueError:
        return None
    return pixels.transpose(2, 0, 1)


def choose_denominator(width: int, height: int, min_width: int, min_height: int) -> int:
    """Return the denominator of the smallest scale that keeps the image at least this large, as Pillow's `draft`."""
    if max(width, height) < MIN_SCALED_SIDE:
        return 1
    scale = min(width // min_width, height // min_height)
    return next((denominator for denominator in _DENOMINATORS if denominator <= scale), 1)


def rotate_upright(image: Image.Image) -> Image.Image:
    """Rotate an image according to EXIF; the image itself, not a copy, if it is upright."""
    is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    return image if is_upright else ImageOps.exif_transpose(image)


def picture_to_input(image: Image.Image, channels: int, preprocessing: Preprocessing, index: int) -> Images:
    """Return a Pillow image of an index as `decode_into` does, C x size x size uint8, without EXIF rotation.

    Raises ValueError if the mode is unsupported, or the exception of Pillow's decoder.
    """
    image = convert_mode(image, _mode(channels))
    return _apply(preprocessing.plan(index, image.height, image.width), image)


def crop_images(images: Images, indices: Indices, preprocessing: Preprocessing | None) -> Images:
    """Crop and resize each image, N x C x H x W uint8, to N x C x size x size uint8. Without a random box, return
    them."""
    if preprocessing is None or preprocessing.random_box is None:
        return images
    rows = zip(images, indices.tolist(), strict=True)
    return np.stack([picture_to_input(_from_array(row), len(row), preprocessing, index) for row, index in rows])


def natural_mode(image: Image.Image) -> str:
    """Return the mode of the two that `convert_mode` knows in which an image keeps its colors."""
    return "L" if image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I") else "RGB"


def convert_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert an image to mode "L" or "RGB", with transparent pixels composited on white.

    Raises ValueError for floating-point images, whose value range is not defined.
    """
    check_mode(image)
    if image.mode.startswith("I"):
        # 16-bit grayscale; Pillow's own conversion clips at 255.
        shades = np.asarray(image).astype(np.int64) // SIXTEEN_BIT_DIVISOR
        image = Image.fromarray(shades.clip(0, 255).astype(np.uint8))
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        # The color stored for a transparent pixel is arbitrary.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def check_mode(image: Image.Image) -> None:
    """Raise UnusableImageError for an image whose pixels have no defined range: floating-point numbers, and 32-bit or
    signed integers of TIFF. Of other formats, the range of Pillow's mode I is that of 16 bits."""
    kind = "floating-point" if image.mode == "F" else "32-bit or signed integer"
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        kind = f"{kind} pixels (Pillow mode {image.mode})"
        reason = f"an image of {kind}, which have no defined range; convert it to 8 or 16 bits"
        raise UnusableImageError(reason, code="not-supported")


def _mode(channels: int) -> str:
    """Return the Pillow mode with this number of channels."""
    return "L" if channels == 1 else "RGB"


def _apply(plan: ResizePlan, image: Image.Image) -> Images:
    """Crop and resize an image with Pillow."""
    cropped = image if plan.box == (0, 0, *image.size) else image.crop(plan.box)
    resampling, size = Image.Resampling[plan.interpolation.upper()], plan.size
    left, top, right, bottom = plan.left, plan.top, plan.left + size, plan.top + size
    if plan.is_elongated:
        # Only what the crop shows.
        scale_x, scale_y = cropped.width / plan.width, cropped.height / plan.height
        shown = left * scale_x, top * scale_y, right * scale_x, bottom * scale_y
        resized = cropped.resize((size, size), resampling, shown)
    else:
        resized = cropped.resize((plan.width, plan.height), resampling)
        resized = resized if resized.size == (size, size) else resized.crop((left, top, right, bottom))
    pixels = np.asarray(resized, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _from_array(pixels: Images) -> Image.Image:
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
