"""Decoding of single images: accepted files, colors, EXIF orientation, and JPEG files, which simplejpeg decodes."""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from engine.train.data.sources.base import ImageFormat, UnreadableImageError
from engine.train.data.sources.folder import _check_image
from engine.train.data.sources.formats import Box, Preprocessing, center_box
from engine.train.data.sources.image import (
    IMAGE_FORMATS,
    decode_into,
    decode_jpeg,
    empty_images,
    open_image,
    read_image,
    read_jpeg_size,
)
from support.messages import raises_problem, says

RGB_16 = ImageFormat(16, 3, (), ())
RED, BLUE = (220, 40, 30), (20, 60, 200)


def read(path: Path, image_format: ImageFormat = RGB_16) -> np.ndarray:
    """Read an image as H x W x C."""
    return read_image(path, image_format).transpose(1, 2, 0).astype(int)


def crop_photo(path: Path, size: int, box: Callable[[int, int, int], Box] | None = None) -> np.ndarray:
    """Read an image for training, C x H x W."""
    pixels = empty_images(3, size, size)
    decode_into(pixels, path.read_bytes(), Preprocessing(size, None, "crop", "bilinear", draft=True, random_box=box))
    return pixels.astype(int)


def halves(upper: object, lower: object, mode: str = "RGB", size: tuple[int, int] = (32, 32)) -> Image.Image:
    image = Image.new(mode, size, upper)  # type: ignore[arg-type]
    image.paste(lower, (0, size[1] // 2, *size))  # type: ignore[arg-type]
    return image


def test_read_image_composites_transparency_on_white(tmp_path: Path) -> None:
    halves((*RED, 255), (0, 0, 0, 0), "RGBA").save(tmp_path / "alpha.png")
    halves((*RED, 255), (0, 0, 0, 0), "RGBA").save(tmp_path / "alpha.webp", lossless=True)
    palette = halves(RED, (1, 2, 3)).quantize(4)
    hidden = palette.getpixel((0, 31))
    palette.save(tmp_path / "palette.png", transparency=hidden)
    palette.save(tmp_path / "palette.gif", transparency=hidden)
    for path in sorted(tmp_path.iterdir()):
        pixels = read(path)
        assert np.abs(pixels[2, 5] - RED).max() <= 4, path.name
        assert pixels[13, 5].tolist() == [255, 255, 255], path.name
    halves((90, 255), (0, 0), "LA").save(tmp_path / "gray.png")
    assert read(tmp_path / "gray.png", ImageFormat(16, 1, (), ()))[[2, 13], 5].tolist() == [[90], [255]]


def test_read_image_keeps_opaque_palette_colors(tmp_path: Path) -> None:
    halves(RED, BLUE).quantize(4).save(tmp_path / "palette.png")
    pixels = read(tmp_path / "palette.png")
    assert np.abs(pixels[[2, 13], 5] - [RED, BLUE]).max() <= 4


def test_read_image_uses_first_frame_of_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (20, 20), color) for color in (RED, BLUE, (0, 0, 0))]
    for name in ("moving.gif", "moving.png", "moving.webp", "pages.tiff"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        assert np.abs(read(tmp_path / name)[8, 8] - RED).max() <= 6, name


def test_read_image_converts_cmyk_to_rgb(tmp_path: Path) -> None:
    halves(RED, BLUE).convert("CMYK").save(tmp_path / "print.jpg", quality=98)
    assert np.abs(read(tmp_path / "print.jpg")[[2, 13], 5] - [RED, BLUE]).max() <= 6


def test_read_image_scales_16_bit_grayscale(tmp_path: Path) -> None:
    shades = np.repeat(np.linspace(0, 65535, 16).astype(np.uint16)[:, None], 16, 1)
    for name in ("deep.png", "deep.tiff"):
        Image.fromarray(shades).save(tmp_path / name)
        assert read(tmp_path / name)[:, 3, 0].tolist() == [17 * row for row in range(16)], name


@pytest.mark.parametrize("orientation", range(1, 9))
def test_read_image_applies_exif_orientation_before_crop(tmp_path: Path, orientation: int) -> None:
    """The upper left quarter of a landscape image is red, the rest blue."""
    upright = Image.new("RGB", (480, 320), BLUE)
    upright.paste(RED, (0, 0, 240, 160))
    # A camera stores the inverse of the transposition that EXIF requests for display.
    stored = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = upright.transpose(stored[orientation]) if orientation in stored else upright
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / "photo.jpg", exif=exif, quality=95)

    whole = read(tmp_path / "photo.jpg")
    assert np.abs(whole[3, 3] - RED).max() <= 8
    assert np.abs(whole[[3, 12, 12], [12, 3, 12]] - BLUE).max() <= 8
    sizes: list[tuple[int, int]] = []

    def lower_left(index: int, height: int, width: int) -> tuple[int, int, int, int]:
        sizes.append((height, width))
        return 0, 80, 160, 320

    crop = crop_photo(tmp_path / "photo.jpg", 16, lower_left).transpose(1, 2, 0)
    assert sizes == [(320, 480)]
    assert np.abs(crop[[0, 4], 8] - RED).max() <= 8
    assert np.abs(crop[[6, 15], 8] - BLUE).max() <= 8


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


def test_only_one_large_image_is_open_at_a_time() -> None:
    small, large = png_header(1000, 1000), png_header(8000, 8000)
    opened = threading.Event()

    def open_another() -> None:
        with open_image(large):
            opened.set()

    other = threading.Thread(target=open_another)
    with open_image(large):
        with open_image(small):
            other.start()
        assert not opened.wait(0.2)
    other.join(30)
    assert opened.is_set()


SIZE = 224


def write_photo(path: Path, mode: str = "RGB", size: tuple[int, int] = (300, 260)) -> Path:
    coarse = np.random.default_rng(0).integers(0, 256, (12, 14, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(path, quality=90)
    return path


def decode(data: bytes, mode: str, denominator: int = 1) -> np.ndarray | None:
    size = read_jpeg_size(data)
    assert size is not None
    return decode_jpeg(data, mode, *size, denominator)


@pytest.mark.parametrize(
    "options",
    [
        {"keep_rgb": True},
        *({"subsampling": factors, "progressive": False} for factors in ("4:4:4", "4:2:2", "4:2:0", "4:1:1")),
        {"subsampling": "4:2:0", "progressive": True},
        {"subsampling": "4:2:0", "restart_marker_rows": 1},
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("denominator", [1, 2, 4, 8])
def test_decode_gives_pixels_of_pillow(options: dict[str, Any], mode: str, denominator: int) -> None:
    size = (8 * 17 + 3, 8 * 13 + 5)
    coarse = np.random.default_rng(0).integers(0, 256, (20, 26, 3), dtype=np.uint8)
    photo, file = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), BytesIO()
    photo.save(file, "JPEG", quality=90, **options)
    with Image.open(file) as image:
        image.draft(mode, (size[0] // denominator, size[1] // denominator))
        expected = np.asarray(image.convert(mode)).reshape(image.height, image.width, -1).transpose(2, 0, 1)
    pixels = decode(file.getvalue(), mode, denominator)
    assert pixels is not None
    assert pixels.shape == expected.shape
    assert (pixels == expected).all()


@pytest.mark.parametrize("kind", ["rotated", "CMYK", "PNG", "damaged", "several", "upright", "L"])
def test_read_size_leaves_special_files_to_pillow(kind: str) -> None:
    image, file, exif = Image.new("RGB", (30, 20)), BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6 if kind == "rotated" else 1
    if kind == "several":
        image.save(file, "MPO", save_all=True, append_images=[image])
    else:
        mode = kind if kind in ("CMYK", "L") else "RGB"
        options = {"exif": exif} if kind in ("rotated", "upright") else {}
        image.convert(mode).save(file, "PNG" if kind == "PNG" else "JPEG", **options)
    data = file.getvalue()[:100] if kind == "damaged" else file.getvalue()
    assert read_jpeg_size(data) == ((30, 20) if kind in ("upright", "L") else None)


def test_large_jpeg_is_decoded_for_training_at_half_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denominators = list[int]()
    monkeypatch.setattr(
        "engine.train.data.sources.image.decode_jpeg",
        lambda *args: (denominators.append(args[4]), decode_jpeg(*args))[1],
    )
    path = write_photo(tmp_path / "photo.jpg", size=(640, 480))
    pixels = crop_photo(path, SIZE)
    with Image.open(path) as image:
        expected = np.asarray(image.crop(center_box(480, 640)).resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    assert denominators == [2]
    assert np.abs(pixels - expected.transpose(2, 0, 1)).mean() < 2


def test_read_image_rejects_truncated_jpeg(tmp_path: Path) -> None:
    path = write_photo(tmp_path / "photo.jpg")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert decode(path.read_bytes(), "RGB") is None
    with raises_problem("bad-image", "", f" {path} ", "truncated", kind=UnreadableImageError):
        read_image(path, ImageFormat(SIZE, 3, (), ()))
