"""The header of a JPEG is that of Pillow, and unusual files are left to Pillow."""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.data.sources.jpeg_header import read_header

ORIENTATION = 0x0112


XMP = b"http://ns.adobe.com/xap/1.0/\0"


def make_jpeg(mode: str = "RGB", **options: Any) -> bytes:
    file = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def make_exif(orientation: int | None) -> Image.Exif:
    exif = Image.Exif()
    exif[0x010F] = "camera"
    if orientation is not None:
        exif[ORIENTATION] = orientation
    return exif


def insert_segment(data: bytes, marker: int, content: bytes) -> bytes:
    return data[:2] + struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content + data[2:]


WITH_EXIF = make_jpeg(exif=make_exif(1), subsampling="4:2:0")


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"subsampling": "4:2:0"}, ((2, 2), (1, 1), (1, 1))),
        ({"subsampling": "4:4:4", "restart_marker_blocks": 3}, ((1, 1), (1, 1), (1, 1))),
        ({"mode": "L"}, ((1, 1),)),
        ({"progressive": True, "subsampling": "4:2:2"}, ((2, 1), (1, 1), (1, 1))),
        ({"exif": make_exif(1), "icc_profile": bytes(100_000), "comment": "photo"}, ((2, 2), (1, 1), (1, 1))),
        ({"exif": make_exif(None), "keep_rgb": True}, ((1, 1), (1, 1), (1, 1))),
        ({"xmp": b'<x tiff:Orientation="1"/>'}, ((2, 2), (1, 1), (1, 1))),
    ],
)
def test_read_header_of_upright_jpeg(options: dict[str, Any], sampling: tuple[tuple[int, int], ...]) -> None:
    data = make_jpeg(**options)
    header = read_header(data)
    assert header is not None
    assert (header.width, header.height, header.sampling) == (53, 37, sampling)
    assert header.is_progressive == options.get("progressive", False)
    assert header.restart_interval == options.get("restart_marker_blocks", 0)
    assert data[header.frame_start : header.frame_start + 2] == (b"\xff\xc2" if header.is_progressive else b"\xff\xc0")
    assert read_header(memoryview(data)) == header


@pytest.mark.parametrize(
    "data",
    [
        *(make_jpeg(exif=make_exif(orientation)) for orientation in (0, 2, 6, 8, 9)),
        insert_segment(make_jpeg(), 0xE1, XMP + b'<x tiff:Orientation="6"/>'),
        insert_segment(make_jpeg(), 0xE1, XMP + b"<tiff:Orientation>8</tiff:Orientation>"),
        make_jpeg("CMYK"),
        insert_segment(make_jpeg(), 0xE1, b"Exif\0\0II*\0\xff\xff\0\0"),
        insert_segment(make_jpeg(), 0xE1, b"Exif\0\0damaged"),
        insert_segment(make_jpeg(exif=make_exif(1)), 0xE1, b"Exif\0\0MM\0*\0\0\0\x08\0\0"),
        insert_segment(make_jpeg(), 0xE2, b"MPF\0MM\0*"),
        insert_segment(make_jpeg(), 0xCC, bytes(4)),
        make_jpeg().replace(b"\xff\xc0", b"\xff\xc9", 1),
        make_jpeg().replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c", 1),
        make_jpeg().replace(b"\xff\xc0\x00\x11\x08\x00\x25", b"\xff\xc0\x00\x11\x08\x00\x00", 1),
        make_jpeg()[:300],
        b"",
        b"\xff\xd8",
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_read_header_leaves_unusual_file_to_pillow(data: bytes) -> None:
    assert read_header(data) is None


def test_read_header_is_not_that_of_a_thumbnail() -> None:
    thumbnail, photo = make_jpeg("L"), make_jpeg(subsampling="4:2:0")
    header = read_header(insert_segment(photo, 0xED, thumbnail))
    assert header is not None
    assert header.sampling == ((2, 2), (1, 1), (1, 1))
    assert header.scan_start > len(thumbnail)


def test_read_header_tells_files_apart_that_differ_in_one_byte() -> None:
    data = make_jpeg(restart_marker_blocks=3)
    headers = [read_header(data.replace(b"\xff\xdd\0\x04\0\x03", b"\xff\xdd\0\x04\0" + bytes([n]))) for n in (3, 4, 3)]
    assert [header and header.restart_interval for header in headers] == [3, 4, 3]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 620), st.integers(0, 255)), max_size=4), st.integers(0, 700))
def test_read_header_of_damaged_file_does_not_raise(changes: list[tuple[int, int]], length: int) -> None:
    data = bytearray(WITH_EXIF)
    for position, value in changes:
        data[position] = value
    header = read_header(bytes(data[:length]))
    assert header is None or header.scan_start <= length
