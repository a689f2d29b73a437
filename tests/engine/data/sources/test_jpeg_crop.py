"""A JPEG that is cut at restart markers has the pixels of the whole image."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.data.sources import jpeg
from engine.data.sources.base import Box, ImageFormat, UnreadableImageError
from engine.data.sources.image import decode_image
from engine.data.sources.jpeg_crop import JpegCut, cut_jpeg, skip_rows_below
from engine.data.sources.jpeg_header import JpegHeader, read_header
from support.messages import raises_problem

SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "4:1:1", "L")
RESTARTS = {"restart_marker_blocks": 4}


def make_jpeg(size: tuple[int, int] = (500, 375), sampling: str = "4:2:0", **options: Any) -> bytes:
    coarse = np.random.default_rng(0).integers(0, 256, (size[1] // 6 + 2, size[0] // 6 + 2, 3), dtype=np.uint8)
    photo, file = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), BytesIO()
    if sampling == "L":
        photo.convert("L").save(file, "JPEG", quality=90, **options)
    else:
        photo.save(file, "JPEG", quality=90, subsampling=sampling, **options)
    return file.getvalue()


def parse_header(data: bytes) -> JpegHeader:
    header = read_header(data)
    assert header is not None
    return header


def cut(data: bytes, box: Box, denominator: int = 1) -> JpegCut | None:
    return cut_jpeg(data, parse_header(data), box, denominator)


@st.composite
def jpegs(draw: st.DrawFn) -> bytes:
    size = draw(st.integers(16, 200)), draw(st.integers(16, 200))
    sampling, interval = draw(st.sampled_from(SAMPLINGS)), draw(st.integers(1, 7))
    options = [{"restart_marker_blocks": interval}, {"restart_marker_rows": interval}, {}]
    return make_jpeg(size, sampling, **draw(st.sampled_from(options)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), jpegs(), st.sampled_from([1, 2, 4, 8]))
def test_decode_box_gives_pixels_of_whole_image(choice: st.DataObject, data: bytes, denominator: int) -> None:
    header = parse_header(data)
    whole = jpeg.decode(data, header, "RGB", None, denominator)
    assert whole is not None
    pixels, _, _ = whole
    _, height, width = pixels.shape
    for _ in range(4):
        left, top = choice.draw(st.integers(0, width - 1)), choice.draw(st.integers(0, height - 1))
        right, bottom = choice.draw(st.integers(left + 1, width)), choice.draw(st.integers(top + 1, height))
        part = jpeg.decode(data, header, "RGB", (left, top, right, bottom), denominator)
        assert part is not None
        part_pixels, part_left, part_top = part
        window = part_pixels[:, top - part_top : bottom - part_top, left - part_left : right - part_left]
        assert (window == pixels[:, top:bottom, left:right]).all()


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"restart_marker_blocks": 4}, (3 * 64, 7 * 16)),
        ({"restart_marker_blocks": 8}, (2 * 128, 7 * 16)),
        ({"restart_marker_blocks": 4, "optimize": True}, (3 * 64, 7 * 16)),
        # Segments that cross the end of a row of 32 MCUs, which are cut by rows only.
        ({"restart_marker_blocks": 3}, (500, 9 * 16)),
        ({"restart_marker_rows": 1}, (500, 7 * 16)),
        ({"restart_marker_rows": 2}, (500, 8 * 16)),
    ],
)
def test_cut_contains_box_and_little_more(options: dict[str, Any], size: tuple[int, int]) -> None:
    part = cut(make_jpeg((500, 375), **options), (140, 120, 300, 210))
    assert part is not None
    assert (part.width, part.height) == size
    assert part.left <= 138
    assert part.left + part.width >= 302
    assert part.top <= 118
    assert part.top + part.height >= 212
    assert Image.open(BytesIO(part.data)).size == size


def test_decode_image_of_cut_equals_that_of_file_without_markers() -> None:
    plain, marked = make_jpeg(), make_jpeg(**RESTARTS)
    image_format = ImageFormat(64, 3, (), ())
    for box in ((0, 0, 100, 90), (333, 222, 500, 375), (60, 10, 400, 370), (250, 100, 300, 280)):
        assert cut(marked, box) is not None
        pixels = [decode_image(data, "photo", image_format, lambda *_, box=box: box) for data in (plain, marked)]
        assert (pixels[0] == pixels[1]).all()


@pytest.mark.parametrize(
    "data",
    [
        make_jpeg(),
        make_jpeg(progressive=True, **RESTARTS),
        make_jpeg(**RESTARTS) + b"\0",
        make_jpeg(**RESTARTS)[:-2],
        make_jpeg(**RESTARTS).replace(b"\xff\xd3", b"\xff\xd4", 1),
        make_jpeg(**RESTARTS).replace(b"\xff\xd3", b"", 1),
        make_jpeg(**RESTARTS).replace(b"\xff\xd3", b"\xff\xda", 1),
        make_jpeg(**RESTARTS).replace(b"\xff\xdd\x00\x04\x00\x04", b"\xff\xdd\x00\x04\x00\x05", 1),
    ],
    ids=["no markers", "progressive", "appended", "no end", "wrong number", "missing", "second scan", "interval"],
)
def test_cut_is_none_without_usable_markers(data: bytes) -> None:
    assert cut(data, (10, 10, 100, 100)) is None


def test_cut_is_none_for_most_of_image() -> None:
    assert cut(make_jpeg(**RESTARTS), (4, 4, 496, 370)) is None


def test_skip_rows_below_keeps_rows_of_box() -> None:
    data = make_jpeg()
    part = skip_rows_below(data, parse_header(data), 150)
    assert part is not None
    assert (part.width, part.height) == (500, 160)
    assert skip_rows_below(data, parse_header(data), 340) is None
    assert skip_rows_below(data[:-2], parse_header(data), 150) is None
    progressive = make_jpeg(progressive=True)
    assert skip_rows_below(progressive, parse_header(progressive), 150) is None


def test_decode_image_of_damaged_rows_gives_pixels_of_pillow() -> None:
    data = bytearray(make_jpeg())
    start = parse_header(data).scan_start
    data[start + 1000 : start + 1010] = b"\x55" * 10
    box = (0, 0, 500, 300)
    image_format = ImageFormat(256, 3, (), ())
    with Image.open(BytesIO(data)) as image:
        expected = np.asarray(image.crop(box).resize((256, 256), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    pixels = decode_image(bytes(data), "photo", image_format, lambda *_: box)
    assert np.abs(pixels.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("options", [{}, RESTARTS])
def test_decode_image_rejects_truncated_file(options: dict[str, Any]) -> None:
    data = make_jpeg(**options)
    with raises_problem("bad-image", "", " photo ", "truncated", kind=UnreadableImageError):
        decode_image(data[: len(data) // 2], "photo", ImageFormat(64, 3, (), ()), lambda *_: (0, 0, 100, 90))


def test_decode_image_decodes_whole_file_if_cut_is_damaged(tmp_path: Path) -> None:
    """The pixels are those of Pillow, which accepts more damage."""
    data = bytearray(make_jpeg(**RESTARTS))
    start = parse_header(data).scan_start
    data[start + 1000 : start + 1010] = b"\x55" * 10
    box = (0, 0, 200, 120)
    image_format = ImageFormat(64, 3, (), ())
    with Image.open(BytesIO(data)) as image:
        expected = np.asarray(image.crop(box).resize((64, 64), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    pixels = decode_image(bytes(data), "photo", image_format, lambda *_: box)
    assert np.abs(pixels.astype(int) - expected).max() <= 1
