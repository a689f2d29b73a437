"""Which JPEG files the GPU decodes, and what is cut from them."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from engine.data.sources.base import CropSpec, ImageFormat
from engine.data.sources.gpu_jpeg import GpuJpeg, prepare_jpeg
from engine.data.sources.jpeg_header import read_header

FORMAT = ImageFormat(32, 3, (), (), val_resize=36)
CROP = CropSpec(32, lambda *_: (40, 20, 72, 52))


def encode(file_format: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (128, 96), **options: Any) -> bytes:
    file = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(file, file_format, **options)
    return file.getvalue()


def rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


def prepare(data: bytes, crop: CropSpec | None = CROP, image_format: ImageFormat = FORMAT) -> GpuJpeg:
    jpeg = prepare_jpeg(data, 0, image_format, crop)
    assert jpeg is not None
    return jpeg


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_prepare_jpeg_keeps_plain_file(subsampling: str) -> None:
    data = encode(subsampling=subsampling)
    jpeg = prepare(data)
    assert (jpeg.data, jpeg.width, jpeg.height, jpeg.plan.box) == (data, 128, 96, (40, 20, 72, 52))
    assert (jpeg.plan.width, jpeg.plan.height, jpeg.plan.size) == (32, 32, 32)


def test_prepare_jpeg_accepts_grayscale_file() -> None:
    assert prepare(encode(mode="L")).width == 128


def test_prepare_jpeg_plans_evaluation() -> None:
    jpeg = prepare(encode(), None)
    assert jpeg.plan.box == (0, 0, 128, 96)
    assert (jpeg.plan.width, jpeg.plan.height, jpeg.plan.left, jpeg.plan.top) == (48, 36, 8, 2)


def test_prepare_jpeg_cuts_file_with_restart_markers() -> None:
    data = encode(subsampling="4:2:0", restart_marker_blocks=1)
    jpeg = prepare(data)
    assert len(jpeg.data) < len(data) / 2
    header = read_header(bytes(jpeg.data))
    assert header is not None
    assert (header.width, header.height) == (jpeg.width, jpeg.height) == (48, 48)
    left, top, right, bottom = jpeg.plan.box
    decoded = np.asarray(Image.open(BytesIO(jpeg.data)))[top:bottom, left:right]
    assert np.array_equal(decoded, np.asarray(Image.open(BytesIO(data)))[20:52, 40:72])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(encode("PNG"), id="png"),
        pytest.param(encode(progressive=True), id="progressive"),
        pytest.param(encode(mode="CMYK"), id="cmyk"),
        pytest.param(encode(keep_rgb=True), id="rgb"),
        pytest.param(encode(exif=rotated()), id="rotated"),
        pytest.param(encode(size=(128, 12)), id="tiny"),
        pytest.param(encode()[:-200], id="truncated"),
        pytest.param(encode(size=(4200, 4200), quality=1, mode="L"), id="large"),
        pytest.param(b"", id="empty"),
    ],
)
def test_prepare_jpeg_leaves_other_files_to_cpu(data: bytes) -> None:
    assert prepare_jpeg(data, 0, FORMAT, None) is None


def test_prepare_jpeg_leaves_adobe_rgb_to_cpu() -> None:
    adobe = bytes.fromhex("ffee000e") + b"Adobe" + bytes.fromhex("0064 0000 0000")
    without_jfif = encode()[20:]
    assert without_jfif[:2] == b"\xff\xdb"
    assert prepare_jpeg(b"\xff\xd8" + adobe + b"\x00" + without_jfif, 0, FORMAT, None) is None
    assert prepare(b"\xff\xd8" + adobe + b"\x01" + without_jfif, None).width == 128


def test_prepare_jpeg_leaves_other_filters_to_cpu() -> None:
    lanczos = ImageFormat(32, 3, (), (), interpolation="lanczos")
    assert prepare_jpeg(encode(), 0, lanczos, None) is None
