"""Whole batches of images brought to the model's form, and augmented with each image's own random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import Augment
from engine.data.sampler import Indices, Stream, random_below
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


def augment(images: Tensor, config: Augment, seed: int, epoch: int, indices: Indices) -> Tensor:
    """Random crop and flip of a training batch, N x C x H x W. What is drawn for an image depends on the seed, the
    epoch and the image alone."""
    if config.crop_padding:
        span = 2 * config.crop_padding + 1
        top, left = (
            torch.from_numpy(random_below(span, seed, stream, epoch, indices))
            for stream in (Stream.CROP_ROW, Stream.CROP_COLUMN)
        )
        images = crop(images, config.crop_padding, top, left)
    if config.flip:
        images = flip(images, torch.from_numpy(random_below(2, seed, Stream.FLIP, epoch, indices)).bool())
    return images


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
