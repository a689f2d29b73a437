"""Evaluation resizes and crops images like torchvision's and timm's transforms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as reference

from engine.config.data_sections import Fit, Interpolation
from engine.data.augment.batch_ops import convert_to_format, resized_crop
from engine.data.sources.base import ImageFormat
from engine.data.sources.image import read_image

INTERPOLATIONS: tuple[Interpolation, ...] = ("nearest", "bilinear", "bicubic", "lanczos")


def write_image(path: Path, mode: str, size: tuple[int, int]) -> Path:
    """Write noise: its overshoots show where an interpolation clips."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path, quality=95, lossless=True)
    return path


def torchvision_input(image: Image.Image, image_format: ImageFormat) -> Image.Image:
    resize = image_format.val_resize
    assert resize is not None
    size = [resize] if image_format.fit == "crop" else [resize, resize]
    interpolation = InterpolationMode[image_format.interpolation.upper()]
    return reference.center_crop(
        reference.resize(image.convert("RGB"), size, interpolation), [image_format.val_size] * 2
    )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("fit", ["crop", "squash"])
@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        *(("photo.jpg", "RGB", (301, 207)), ("photo.jpg", "RGB", (40, 33)), ("photo.jpg", "RGB", (207, 901))),
        *(("photo.jpg", "CMYK", (151, 203)), ("photo.png", "L", (99, 240)), ("photo.webp", "RGB", (123, 77))),
        *(("line.png", "RGB", (1, 300)), ("line.png", "RGB", (901, 3))),
    ],
)
def test_read_image_matches_torchvision_within_one_level(
    tmp_path: Path, name: str, mode: str, size: tuple[int, int], fit: Fit, interpolation: Interpolation
) -> None:
    path = write_image(tmp_path / name, mode, size)
    image_format = ImageFormat(48, 3, (), (), 57, 64, fit, interpolation)
    with Image.open(path) as image:
        expected = np.asarray(torchvision_input(image, image_format)).transpose(2, 0, 1)
    assert np.abs(read_image(path, image_format).astype(int) - expected).max() <= 1


def test_read_image_squashes_whole_image_without_resize(tmp_path: Path) -> None:
    path = write_image(tmp_path / "photo.png", "RGB", (90, 60))
    pixels = read_image(path, ImageFormat(32, 3, (), (), fit="squash", interpolation="bicubic"))
    with Image.open(path) as image:
        expected = np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert (pixels == expected).all()


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_convert_to_format_of_stored_images_matches_torchvision(interpolation: Interpolation) -> None:
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image_format = ImageFormat(32, 3, (), (), 36, 41, "crop", interpolation)
    converted = convert_to_format(images, image_format)
    for image, pixels in zip(images, converted, strict=True):
        expected = torchvision_input(reference.to_pil_image(image), image_format)
        assert np.abs(pixels.numpy().astype(int) - np.asarray(expected).transpose(2, 0, 1)).max() <= 1


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_resized_crop_on_device_matches_pillow(interpolation: Interpolation) -> None:
    images = torch.randint(0, 256, (2, 3, 30, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([[3, 5, 29, 21], [0, 0, 9, 12]])
    crops = resized_crop(images, boxes, 16, interpolation)
    for image, box, crop in zip(images, boxes.tolist(), crops, strict=True):
        cropped = reference.to_pil_image(image).crop(box)
        expected = cropped.resize((16, 16), Image.Resampling[interpolation.upper()])
        assert np.abs(crop.numpy().astype(int) - np.asarray(expected).transpose(2, 0, 1)).max() <= 2
