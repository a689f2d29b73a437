"""Batch transforms give the same pixels in both memory formats, and keep the format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from engine.train.data.augment.batch_ops import MIN_SINGLE_COPY_BYTES, erase, flip, is_channels_last, normalize

BOXES = torch.tensor([[0, 0, 3, 4], [2, 1, 7, 5], [0, 0, 0, 0]])
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda images: flip(images, torch.tensor([True, False, True])),
    "vertical flip": lambda images: flip(images, torch.tensor([True, False, True]), -2),
    "erase": lambda images: erase(images, BOXES, range(images.shape[1])),
    "normalize": lambda images: normalize(images, torch.full((1, 1, 1, 1), 0.4), torch.full((1, 1, 1, 1), 0.2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("channels", [1, 3])
def test_batch_transform_keeps_memory_format_and_pixels(name: str, channels: int) -> None:
    images = torch.randint(0, 256, (3, channels, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    result = TRANSFORMS[name](images)
    assert result.is_contiguous()
    in_channels_last = TRANSFORMS[name](images.contiguous(memory_format=torch.channels_last))
    assert is_channels_last(in_channels_last) == (channels > 1)
    assert (in_channels_last == result).all()


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_flip_flips_large_images(memory_format: torch.memory_format, dim: Literal[-1, -2]) -> None:
    images = torch.randint(0, 256, (3, 3, 80, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = images.contiguous(memory_format=memory_format)
    assert images[:1].numel() >= MIN_SINGLE_COPY_BYTES
    flipped = flip(images, torch.tensor([True, False, True]), dim)
    assert flipped.is_contiguous(memory_format=memory_format)
    expected = torch.stack([images[0].flip(dim), images[1], images[2].flip(dim)])
    assert torch.equal(flipped, expected)
    assert torch.equal(flip(images, torch.tensor([True, False, True]), dim, may_overwrite=True), expected)
