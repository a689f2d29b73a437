"""Which image files are opened, and how many pixels are decoded at the same time."""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from engine.data.sources import jpeg
from engine.data.sources.base import ImageFormat, UnreadableImageError
from engine.data.sources.folder import _check_image
from engine.data.sources.image import read_image
from engine.data.sources.image_file import IMAGE_FORMATS, PixelBudget
from engine.data.sources.resize import center_box
from support.messages import raises_problem, says

RGB_16 = ImageFormat(16, 3, (), ())
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n"


def png_header(width: int, height: int) -> bytes:
    """Return the beginning of a grayscale PNG without pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\1\0IDAT"


@pytest.mark.parametrize("image_format", sorted(set(IMAGE_FORMATS)))
def test_read_image_reads_supported_format(tmp_path: Path, image_format: str) -> None:
    path = tmp_path / "image"
    try:
        Image.new("RGB", (20, 20), (220, 40, 30)).save(path, image_format)
    except OSError as error:
        pytest.skip(f"Pillow was built without {image_format}: {error}")
    assert np.abs(read_image(path, RGB_16)[:, 8, 8].astype(int) - (220, 40, 30)).max() <= 6
    assert isinstance(_check_image(path), int)


@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        (EPS, "not-supported", [" EPS, ", " PNG"]),
        (b"SIMPLE  =                    T", "not-supported", [" FITS, ", " PNG"]),
        (b"%PDF-1.7", "bad-image", []),
        (b"", "bad-image", []),
        (png_header(0, 0), "bad-image", [" PNG "]),
        (png_header(15_000, 15_000), "too-large", [" 178,956,970 "]),
    ],
    ids=["eps", "fits", "pdf", "empty", "damaged", "too large"],
)
def test_unusable_image_is_named_without_opening_it(
    tmp_path: Path, content: bytes, code: str, values: list[str]
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(content)
    reason = str(_check_image(path))
    assert says(reason, code, *values)
    with raises_problem("bad-image", "", f" {path} ", reason, kind=UnreadableImageError):
        read_image(path, RGB_16)


def test_text_with_letters_of_a_signature_is_no_damaged_image(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("BMW\n")
    reason = str(_check_image(tmp_path / "notes"))
    assert says(reason, "bad-image") and "BMP" not in reason


@pytest.mark.parametrize("image_format", ["JPEG", "WEBP"])
def test_sparse_image_file_is_not_read(tmp_path: Path, image_format: str) -> None:
    path = tmp_path / "image"
    Image.new("RGB", (70, 70)).save(path, image_format)
    os.truncate(path, 1 << 36)
    assert says(str(_check_image(path)), "too-large", " 256 MiB")
    with raises_problem("bad-image", "", f" {path} ", " 256 MiB", kind=UnreadableImageError):
        read_image(path, RGB_16)


def test_image_replaced_by_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "image.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "image.png")
    for path in tmp_path.iterdir():
        with pytest.raises(UnreadableImageError) as error:
            read_image(path, RGB_16)
        assert says(str(error.value), "bad-image", f" {path} ") and says(str(error.value), "not-a-file")


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [((4, 4), True), ((5, 5), True), ((6, 5), False), ((4, 4, 4), False), ((25, 1), False), ((25, 25), False)],
)
def test_pixel_budget_admits_what_fits_and_larger_image_alone(sizes: tuple[int, ...], fits: bool) -> None:
    budget = PixelBudget(10)
    all_inside, finished = threading.Barrier(len(sizes)), []

    def decode(pixels: int) -> None:
        with budget.reserve(pixels):
            try:
                all_inside.wait(20 if fits else 0.2)
                finished.append("together")
            except threading.BrokenBarrierError:
                finished.append("alone")

    threads = [threading.Thread(target=decode, args=(pixels,)) for pixels in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert finished == ["together" if fits else "alone"] * len(sizes)


@pytest.mark.parametrize("read", [lambda path: read_image(path, RGB_16, center_box), _check_image])
@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_pixels_are_decoded_only_within_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], image_format: str
) -> None:
    reserved, decoded = list[int](), list[bool]()

    class RecordingBudget(PixelBudget):
        @contextmanager
        def reserve(self, pixels: int) -> Iterator[None]:
            reserved.append(pixels)
            yield
            reserved.pop()

    def load(image: ImageFile.ImageFile) -> object:
        decoded.append(bool(reserved))
        return original_load(image)

    def decode_jpeg(*args: Any) -> object:
        decoded.append(bool(reserved))
        return original_decode_jpeg(*args)

    original_decode_jpeg = jpeg.decode
    monkeypatch.setattr(jpeg, "decode", decode_jpeg)
    Image.new("RGB", (1100, 1000), (1, 2, 3)).save(tmp_path / "image", image_format)
    with Image.open(tmp_path / "image") as opened:
        original_load = type(opened).load
        monkeypatch.setattr(type(opened), "load", load)
    monkeypatch.setattr("engine.data.sources.image_file._PIXEL_BUDGET", RecordingBudget(1))
    read(tmp_path / "image")
    assert set(decoded) == {True}
