"""Whole batches of images: brought to the model's form, cropped and mirrored by numbers that were drawn before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.data.sources.base import ImageFormat

# ITU-R BT.601, as Pillow makes grey of colour.
_LUMA = (0.299, 0.587, 0.114)


def convert_to_format(images: Tensor, image_format: ImageFormat) -> Tensor:
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


def resized_crop(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Of each image its box (N x 4: left, top, right, bottom), brought to `size` x `size` as Pillow's bilinear filter
    does it, which takes the mean over more pixels where it makes an image smaller: within 2 of 255 of its values, for
    it rounds between the two directions."""
    left, top, right, bottom = boxes.unbind(1)
    down, across = (
        _resize_weights(top, bottom, images.shape[2], size),
        _resize_weights(left, right, images.shape[3], size),
    )
    return (down @ images.float() @ across.transpose(2, 3)).round().clamp(0, 255).to(torch.uint8)


def _resize_weights(start: Tensor, end: Tensor, length: int, size: int) -> Tensor:
    """What each pixel of a line of `length` gives to each of the `size` that its part from `start` to `end` becomes:
    N x 1 x size x length, each row with the sum 1."""
    first, last = start.view(-1, 1, 1, 1), end.view(-1, 1, 1, 1)
    scale = (last - first) / size
    centres = first + (torch.arange(size, device=start.device).view(-1, 1) + 0.5) * scale
    pixels = torch.arange(length, device=start.device)
    weights = (1 - (pixels + 0.5 - centres).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * ((first <= pixels) & (pixels < last))
    return weights / weights.sum(-1, keepdim=True)


def pad_and_crop(images: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Each image with a black border of `padding`, cut to its old size from the row and column in `offsets` (N x 2)."""
    count, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4).contiguous()
    high, wide = padded.shape[2:]
    # Each place of the padded batch begins a row of `width` pixels: rows are copied whole, which is several times as
    # fast as pixel by pixel.
    rows = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
    planes = torch.arange(0, count * channels * high, high, device=images.device).view(count, channels, 1)
    lines = planes + offsets[:, 0].view(-1, 1, 1) + torch.arange(height, device=images.device)
    starts = lines * wide + offsets[:, 1].view(-1, 1, 1)
    return rows.index_select(0, starts.flatten()).view(count, channels, height, width)


def horizontal_flip(images: Tensor, mask: Tensor) -> Tensor:
    """Those images for which `mask` (N, bool) is true, mirrored left to right."""
    places = torch.arange(len(images), device=images.device)
    # Images are copied whole, which is several times as fast as to choose pixel by pixel.
    return torch.cat([images, images.flip(-1)]).index_select(0, places + len(images) * mask)


def erase(images: Tensor, boxes: Tensor, fill: Sequence[int]) -> Tensor:
    """Each image with its rectangle (N x 4: left, top, right, bottom) filled with `fill`, one value a channel."""
    left, top, right, bottom = boxes.view(-1, 4, 1, 1).unbind(1)
    rows = torch.arange(images.shape[2], device=images.device).view(-1, 1)
    columns = torch.arange(images.shape[3], device=images.device)
    inside = (top <= rows) & (rows < bottom) & (left <= columns) & (columns < right)
    return torch.stack([images[:, n].masked_fill(inside, value) for n, value in enumerate(fill)], 1)


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 to float32 on the images' device: (value / 255 - mean) / std, both 1 x C x 1 x 1."""
    return images.float().div_(255).sub_(mean).div_(std)
