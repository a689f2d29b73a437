"""Prepare JPEG files on the CPU for a decoder on the GPU: which files it decodes, cut to the box of their crop.

`engine.data.pipelines.encoded_batch` collects them for a batch. `engine.data.pipelines.gpu_decoder` decodes, crops and
resizes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.data_sections import Interpolation
from engine.data.sources.base import CropSpec, ImageFormat
from engine.data.sources.jpeg_crop import COLOR_SAMPLINGS, cut_jpeg
from engine.data.sources.jpeg_header import JpegHeader, read_header
from engine.data.sources.resize import ResizePlan, crop_format, plan_resize

# Filters that torch has on the GPU, with antialiasing.
GPU_INTERPOLATIONS: tuple[Interpolation, ...] = ("bilinear", "bicubic")
# 48 MiB of decoded pixels on the GPU, and four times that while they are resized.
MAX_GPU_PIXELS = 1 << 24
# Shared memory of one image of a batch. Larger files are decoded to pixels before they get there.
MAX_GPU_BYTES = 8 << 20
# nvJPEG's hardware engines reject tiny images.
MIN_GPU_SIDE = 16

_BASELINE_FRAME = b"\xff\xc0"
_END_MARKER = b"\xff\xd9"
_ADOBE_SEGMENT = b"\xff\xee\x00\x0eAdobe"
_FIRST_COMPONENT = 10  # offset of the first component in a frame header, where each has three bytes
# libjpeg-turbo takes the components of such a file for RGB (jdapimin.c). nvJPEG takes all for YCbCr.
_RGB_COMPONENTS = b"RGB"


@dataclass(frozen=True)
class GpuJpeg:
    """A JPEG file that the GPU decodes to `width` x `height` pixels, and how the GPU crops and resizes these."""

    data: bytes | memoryview | bytearray
    width: int
    height: int
    plan: ResizePlan


def prepare_jpeg(
    data: bytes | memoryview, index: int, image_format: ImageFormat, crop: CropSpec | None
) -> GpuJpeg | None:
    """Prepare the image `index` of a part, in the format and with the crop of `EncodedSource.load`.

    Returns None for a file that the CPU must decode. The GPU decodes at full scale only, so a large image of the
    training is resized from more pixels than on the CPU (`Preprocessing.draft`).
    """
    header = read_header(data)
    if header is None or not _is_plain(data, header):
        return None
    image_format, get_box = crop_format(crop, index, image_format)
    preprocessing = image_format.preprocessing(training=get_box is not None)
    plan = plan_resize(preprocessing, header.height, header.width, get_box)
    if plan.is_elongated or plan.interpolation not in GPU_INTERPOLATIONS:
        return None
    cut = cut_jpeg(data, header, plan.box)
    if cut is not None and min(cut.width, cut.height) >= MIN_GPU_SIDE:
        jpeg = GpuJpeg(cut.data, cut.width, cut.height, plan.moved(-cut.left, -cut.top))
    else:
        jpeg = GpuJpeg(data, header.width, header.height, plan)
    return jpeg if jpeg.width * jpeg.height <= MAX_GPU_PIXELS and len(jpeg.data) <= MAX_GPU_BYTES else None


def _is_plain(data: bytes | memoryview, header: JpegHeader) -> bool:
    """Whether nvJPEG decodes a file fast, and to the colors of libjpeg-turbo: baseline, in one scan, gray or YCbCr.

    A truncated file, which nvJPEG may decode without an error, is not plain.
    """
    return (
        bytes(data[header.frame_start : header.frame_start + 2]) == _BASELINE_FRAME
        and header.scan_components == len(header.sampling)
        and (len(header.sampling) == 1 or header.sampling in COLOR_SAMPLINGS)
        and min(header.width, header.height) >= MIN_GPU_SIDE
        and bytes(data[-2:]) == _END_MARKER
        and (len(header.sampling) == 1 or _is_ycbcr(data, header))
    )


def _is_ycbcr(data: bytes | memoryview, header: JpegHeader) -> bool:
    first = header.frame_start + _FIRST_COMPONENT
    if bytes(data[first : first + 9 : 3]) == _RGB_COMPONENTS:
        return False
    before_scan = bytes(data[: header.scan_start])
    adobe = before_scan.find(_ADOBE_SEGMENT)
    # The last byte of Adobe's segment is the color transform: 1 is YCbCr.
    return adobe < 0 or before_scan[adobe + 15 : adobe + 16] == b"\x01"
