"""Whole batches of images: brought to the model's form, cropped and mirrored by numbers that were drawn before."""

from __future__ import annotations

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


def crop(images: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    """Each image with a black border of `padding`, cut to its old size from row `top` and column `left` (both N)."""
    count, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    rows = (top[:, None] + torch.arange(height)).view(count, 1, height, 1)
    columns = (left[:, None] + torch.arange(width)).view(count, 1, 1, width)
    return padded[torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1), rows, columns]


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Those images for which `chosen` (N, bool) is true, mirrored left to right."""
    return torch.where(chosen.view(-1, 1, 1, 1), images.flip(-1), images)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 to float32 on the images' device: (value / 255 - mean) / std, both 1 x C x 1 x 1."""
    return (images.float() / 255 - mean) / std
