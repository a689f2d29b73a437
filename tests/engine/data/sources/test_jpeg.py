"""simplejpeg decodes JPEG files to the same pixels as Pillow."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from engine.data.augment.crops import random_resized_crop_box, random_resized_crop_boxes
from engine.data.sources import jpeg
from engine.data.sources.base import ImageFormat, Images, UnreadableImageError
from engine.data.sources.image import read_image
from engine.data.sources.resize import center_box
from support.messages import has_problem, raises_problem

SIZE = 224


def write_photo(path: Path, mode: str = "RGB", size: tuple[int, int] = (300, 260)) -> Path:
    coarse = np.random.default_rng(0).integers(0, 256, (12, 14, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(path, quality=90)
    return path


def read_with_pillow(path: Path, mode: str, box: tuple[int, int, int, int], size: int = SIZE) -> Images:
    pixels = np.asarray(Image.open(path).convert(mode).crop(box).resize((size, size), Image.Resampling.BILINEAR))
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def decode(data: bytes, mode: str, denominator: int = 1) -> Images | None:
    size = jpeg.read_size(data)
    assert size is not None
    return jpeg.decode(data, mode, *size, denominator)


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
    assert jpeg.read_size(data) == ((30, 20) if kind in ("upright", "L") else None)


def test_read_image_decodes_large_jpeg_for_training_at_half_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denominators = list[int]()
    decode_jpeg = jpeg.decode
    monkeypatch.setattr(jpeg, "decode", lambda *args: (denominators.append(args[4]), decode_jpeg(*args))[1])
    path = write_photo(tmp_path / "photo.jpg", size=(640, 480))
    pixels, expected = (
        read_image(path, ImageFormat(SIZE, 3, (), ()), center_box),
        read_with_pillow(path, "RGB", center_box(480, 640)),
    )
    assert denominators == [2]
    assert np.abs(pixels.astype(int) - expected).mean() < 2


@pytest.mark.parametrize("size", [(640, 480), (300, 260)])
def test_read_image_without_simplejpeg_decodes_with_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    path, image_format = write_photo(tmp_path / "photo.jpg", size=size), ImageFormat(SIZE, 3, (), ())
    expected = read_image(path, image_format, center_box)
    assert jpeg.decoder_warning() is None
    monkeypatch.setattr(jpeg, "_load_simplejpeg", lambda: None)
    assert np.abs(read_image(path, image_format, center_box).astype(int) - expected).max() <= 1
    assert (warning := jpeg.decoder_warning()) is not None
    assert has_problem([warning], "not-installed", "", "pip install simplejpeg")


def test_read_image_rejects_truncated_jpeg(tmp_path: Path) -> None:
    path = write_photo(tmp_path / "photo.jpg")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert decode(path.read_bytes(), "RGB") is None
    with raises_problem("bad-image", "", f" {path} ", "truncated", kind=UnreadableImageError):
        read_image(path, ImageFormat(SIZE, 3, (), ()))


@pytest.mark.parametrize(("height", "width"), [(256, 256), (375, 500), (40, 400), (400, 40), (1, 1)])
def test_random_resized_crop_box_matches_vectorized_boxes(height: int, width: int) -> None:
    indices = np.arange(500)
    for scale, ratio in (((0.08, 1.0), (0.75, 4 / 3)), ((0.9, 1.0), (1.0, 1.0)), ((0.3, 0.6), (0.2, 0.9))):
        boxes = random_resized_crop_boxes(scale, ratio, height, width, 7, 3, indices)
        assert boxes.tolist() == [
            list(random_resized_crop_box(scale, ratio, 7, 3, index, height, width)) for index in range(500)
        ]
