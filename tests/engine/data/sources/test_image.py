"""Decoding of single images: transparency, palettes, animations, CMYK, 16 bits, EXIF orientation and broken files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.data.sources.base import ImageFormat
from engine.data.sources.image import read_image

RGB_16 = ImageFormat(16, 3, (), ())
RED, BLUE = (220, 40, 30), (20, 60, 200)


def read(path: Path, image_format: ImageFormat = RGB_16) -> np.ndarray:
    """Read an image as H x W x C."""
    return read_image(path, image_format).transpose(1, 2, 0).astype(int)


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

    def lower_left(height: int, width: int) -> tuple[int, int, int, int]:
        sizes.append((height, width))
        return 0, 80, 160, 320

    crop = read_image(tmp_path / "photo.jpg", RGB_16, lower_left).transpose(1, 2, 0).astype(int)
    assert sizes == [(320, 480)]
    assert np.abs(crop[[0, 4], 8] - RED).max() <= 8
    assert np.abs(crop[[6, 15], 8] - BLUE).max() <= 8
