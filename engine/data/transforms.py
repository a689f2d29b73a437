"""Whole batches of images: brought to the model's form, cropped and mirrored by numbers that were drawn before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.data.source import ImageFormat

# ITU-R BT.601, as Pillow makes grey of colour.
_LUMA = (0.299, 0.587, 0.114)


def fit(images: Tensor, image_format: ImageFormat) -> Tensor:
    """N x C x H x W, uint8, brought to the format's channels and size."""
    if images.shape[1] == 1 and image_format.channels == 3:
        images = images.expand(-1, 3, -1, -1)
    elif images.shape[1] == 3 and image_format.channels == 1:
        weights = torch.tensor(_LUMA).view(1, 3, 1, 1)
        images = (images * weights).sum(1, keepdim=True).round().to(torch.uint8)
    if images.shape[-1] == image_format.size:
        return images
    size = (image_format.size, image_format.size)
    resized = F.interpolate(images.float(), size, mode="bilinear", antialias=True, align_corners=False)
    return resized.round().clamp(0, 255).to(torch.uint8)


def crop(images: Tensor, padding: int, corners: Tensor) -> Tensor:
    """Each image with a black border of `padding`, cut to its old size from the row and column in `corners` (N x 2)."""
    count, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    high, wide = padded.shape[2:]
    # Each place of the padded batch begins a row of `width` pixels: rows are copied whole, which is several times as
    # fast as pixel by pixel.
    rows = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
    planes = torch.arange(0, count * channels * high, high, device=images.device).view(count, channels, 1)
    lines = planes + corners[:, 0].view(-1, 1, 1) + torch.arange(height, device=images.device)
    starts = lines * wide + corners[:, 1].view(-1, 1, 1)
    return rows.index_select(0, starts.flatten()).view(count, channels, height, width)


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Those images for which `chosen` (N, bool) is true, mirrored left to right."""
    places = torch.arange(len(images), device=images.device)
    # Images are copied whole, which is several times as fast as to choose pixel by pixel.
    return torch.cat([images, images.flip(-1)]).index_select(0, places + len(images) * chosen)


def erase(images: Tensor, rectangles: Tensor, colour: Sequence[int]) -> Tensor:
    """Each image with its rectangle (N x 4: left, top, right, bottom) filled with `colour`, one value a channel."""
    left, top, right, bottom = rectangles.view(-1, 4, 1, 1).unbind(1)
    rows = torch.arange(images.shape[2], device=images.device).view(-1, 1)
    columns = torch.arange(images.shape[3], device=images.device)
    inside = (top <= rows) & (rows < bottom) & (left <= columns) & (columns < right)
    # Products of bytes, for which there are vector instructions where there are none to choose by a mask.
    kept, taken = (~inside).to(images.dtype), inside.to(images.dtype)
    return torch.stack([images[:, n] * kept + taken * value for n, value in enumerate(colour)], 1)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 to float32 on the images' device: (value / 255 - mean) / std, both 1 x C x 1 x 1."""
    return (images.float() / 255 - mean) / std
