"""JPEG files decode to the same pixels with torchvision's decoder and with Pillow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.data.augment.crops import random_resized_crop_box, random_resized_crop_boxes
from engine.data.sources import jpeg
from engine.data.sources.base import ImageFormat, Images, UnreadableImageError
from engine.data.sources.image import read_image
from engine.data.sources.resize import center_box
from gputrain_command import ROOT

SIZE = 224


def write_photo(path: Path, mode: str = "RGB", size: tuple[int, int] = (300, 260)) -> Path:
    coarse = np.random.default_rng(0).integers(0, 256, (12, 14, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(path, quality=90)
    return path


def read_with_pillow(path: Path, mode: str, box: tuple[int, int, int, int], size: int = SIZE) -> Images:
    pixels = np.asarray(Image.open(path).convert(mode).crop(box).resize((size, size), Image.Resampling.BILINEAR))
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


@pytest.mark.parametrize("stored", ["RGB", "L"])
@pytest.mark.parametrize(("channels", "mode"), [(3, "RGB"), (1, "L")])
def test_read_image_full_size_jpeg_matches_pillow(tmp_path: Path, stored: str, channels: int, mode: str) -> None:
    path, image_format = write_photo(tmp_path / "photo.jpg", stored), ImageFormat(SIZE, channels, (), ())
    assert jpeg.decode(path.read_bytes(), mode) is not None
    for get_box in (center_box, lambda height, width: (30, 20, width - 11, height - 3)):
        pixels, expected = read_image(path, image_format, get_box), read_with_pillow(path, mode, get_box(260, 300))
        assert np.abs(pixels.astype(int) - expected).max() <= 1 + (stored != mode)


def test_read_image_decodes_large_jpeg_for_training_at_half_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jpeg, "decode", lambda *_: pytest.fail("decoded at full size"))
    path = write_photo(tmp_path / "photo.jpg", size=(640, 480))
    pixels, expected = (
        read_image(path, ImageFormat(SIZE, 3, (), ()), center_box),
        read_with_pillow(path, "RGB", center_box(480, 640)),
    )
    assert np.abs(pixels.astype(int) - expected).mean() < 2
    # The evaluation of a run of an earlier version.
    assert (read_image(path, ImageFormat(SIZE, 3, (), (), val_draft=True)) == pixels).all()


def test_read_image_falls_back_to_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes = write_photo(tmp_path / "photo.jpg"), list[str]()
    expected = read_image(path, ImageFormat(SIZE, 3, (), ()))
    monkeypatch.setattr(jpeg, "decode", lambda _, mode: modes.append(mode))
    pixels = read_image(path, ImageFormat(SIZE, 3, (), ()))
    assert modes == ["RGB"]
    assert np.abs(pixels.astype(int) - expected).max() <= 1


def test_read_image_rejects_truncated_jpeg(tmp_path: Path) -> None:
    path = write_photo(tmp_path / "photo.jpg")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert jpeg.decode(path.read_bytes(), "RGB") is None
    with pytest.raises(UnreadableImageError, match="truncated"):
        read_image(path, ImageFormat(SIZE, 3, (), ()))


def test_jpeg_decode_does_not_import_torchvision(tmp_path: Path) -> None:
    write_photo(tmp_path / "photo.jpg")
    program = """
import pathlib, sys
from engine.data.sources import jpeg
from engine.data.pipelines import loader
assert jpeg.decode(pathlib.Path(sys.argv[1]).read_bytes(), "RGB").shape == (3, 260, 300)
print("torchvision" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "photo.jpg")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout == "False\n"


@pytest.mark.parametrize(("height", "width"), [(256, 256), (375, 500), (40, 400), (400, 40), (1, 1)])
def test_random_resized_crop_box_matches_vectorized_boxes(height: int, width: int) -> None:
    indices = np.arange(500)
    for scale, ratio in (((0.08, 1.0), (0.75, 4 / 3)), ((0.9, 1.0), (1.0, 1.0)), ((0.3, 0.6), (0.2, 0.9))):
        boxes = random_resized_crop_boxes(scale, ratio, height, width, 7, 3, indices)
        assert boxes.tolist() == [
            list(random_resized_crop_box(scale, ratio, height, width, 7, 3, index)) for index in range(500)
        ]
