"""One description of crop and resize: Pillow, torch, tensors and the exported script follow it as torchvision does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as reference

from engine.config.data_sections import Interpolation
from engine.train.data.augment.batch_ops import convert_to_format, resized_crop
from engine.train.data.sources.formats import ImageFormat, center_box
from engine.train.data.sources.image import read_image
from engine.train.inference.preprocess_script import load_function, preprocess_script

INTERPOLATIONS: tuple[Interpolation, ...] = ("nearest", "bilinear", "bicubic", "lanczos")
SIZE = 48
# Ordinary JPEG files are resized by torch, all others by Pillow.
FILES = [
    *(("photo.jpg", "RGB", (301, 207)), ("small.jpg", "RGB", (40, 33)), ("print.jpg", "CMYK", (151, 203))),
    *(("gray.png", "L", (99, 240)), ("square.png", "RGB", (60, 60)), ("square.jpg", "RGB", (60, 60))),
    *(("wide.png", "RGB", (901, 3)), ("line.png", "RGB", (1, 300)), ("tall.jpg", "RGB", (80, 601))),
]


def write_noise(path: Path, mode: str, size: tuple[int, int]) -> Path:
    """Write noise: its overshoots show where an interpolation clips."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path, quality=95)
    return path


def torchvision_input(image: Image.Image, image_format: ImageFormat) -> NDArray[np.uint8]:
    resize, interpolation = image_format.val_resize, InterpolationMode[image_format.interpolation.upper()]
    image, squash = image.convert("RGB"), image_format.fit == "squash"
    if resize is None:
        whole = image if squash else image.crop(center_box(image.height, image.width))
        result = reference.resize(whole, [SIZE, SIZE], interpolation)
    else:
        resized = reference.resize(image, [resize, resize] if squash else [resize], interpolation)
        result = reference.center_crop(resized, [SIZE, SIZE])
    return np.asarray(result).transpose(2, 0, 1)


def difference(found: NDArray[np.uint8], expected: NDArray[np.uint8]) -> int:
    assert found.shape == expected.shape
    return int(np.abs(found.astype(int) - expected).max())


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_all_ways_to_crop_and_resize_match_torchvision_within_one_level(
    tmp_path: Path, interpolation: Interpolation
) -> None:
    files = [write_noise(tmp_path / name, mode, size) for name, mode, size in FILES]
    for fit in ("crop", "squash"):
        for resize in (None, 64, 51):
            image_format = ImageFormat(SIZE, 3, (0.5,) * 3, (0.5,) * 3, SIZE, resize, fit, interpolation)
            script = load_function(preprocess_script(image_format))
            for path in files:
                case = f"{path.name} {fit} {resize}"
                with Image.open(path) as image:
                    expected, stored = torchvision_input(image, image_format), np.asarray(image.convert("RGB"))
                assert difference(read_image(path, image_format), expected) <= 1, case
                assert difference(script(path), expected) <= 1, case
                if stored.shape[0] == stored.shape[1]:
                    tensors = torch.from_numpy(stored.transpose(2, 0, 1).copy())[None]
                    assert difference(convert_to_format(tensors, image_format)[0].numpy(), expected) <= 1, case


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_resized_crop_on_device_matches_pillow(interpolation: Interpolation) -> None:
    images = torch.randint(0, 256, (2, 3, 30, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([[3, 5, 29, 21], [0, 0, 9, 12]])
    crops = resized_crop(images, boxes, 16, interpolation)
    for image, box, crop in zip(images, boxes.tolist(), crops, strict=True):
        cropped = reference.to_pil_image(image).crop(box)
        expected = cropped.resize((16, 16), Image.Resampling[interpolation.upper()])
        assert difference(crop.numpy(), np.asarray(expected).transpose(2, 0, 1)) <= 2
