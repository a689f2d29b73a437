"""Batch transforms on uint8 images: convert, crop, flip, erase and normalize with parameters drawn in advance.

They run on the device of the images and never synchronize with it. `flip`, `erase` and `normalize` keep the
memory format channels_last, in which images are decoded. `engine.train.data.augment.crops` draws the rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config.data_sections import Interpolation
from engine.train.data.sources.base import Labels
from engine.train.data.sources.formats import ImageFormat, ResizePlan
from engine.train.data.sources.image import Images

# ITU-R BT.601 luma coefficients, which Pillow's convert("L") uses.
_LUMA = (0.299, 0.587, 0.114)
# A CPU copies single images of this size faster than a batch that exceeds its cache: 36 instead of 150 us at 224x224.
MIN_SINGLE_COPY_BYTES = 1 << 14


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device asynchronously, through pinned memory."""
    if tensor.device.type == device.type:
        return tensor
    if not tensor.is_pinned():
        # Tensor.pin_memory keeps the strides, and refuses a gray image that is expanded to three channels.
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def labels_to_device(labels: Labels, device: torch.device) -> Tensor:
    """Copy targets to the device: classes as int64, all others as float32."""
    copied = to_device(torch.from_numpy(labels), device)
    return copied if copied.dtype == torch.int64 else copied.float()


def convert_to_format(images: Tensor, image_format: ImageFormat, *, training: bool = False) -> Tensor:
    """Convert square N x C x H x W uint8 images on the CPU to the channels of a format and its evaluation input.

    With `training` to its training input instead. Float images are returned unchanged.
    """
    if images.is_floating_point():
        return images
    if images.shape[1] == 1 and image_format.channels == 3:
        images = images.expand(-1, 3, -1, -1)
    elif images.shape[1] == 3 and image_format.channels == 1:
        weights = torch.tensor(_LUMA).view(1, 3, 1, 1)
        images = (images * weights).sum(1, keepdim=True).round().to(torch.uint8)
    preprocessing, side = image_format.preprocessing(training=training), images.shape[-1]
    size = preprocessing.resized_size
    if side != size and preprocessing.interpolation == "bilinear":
        resized = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True, align_corners=False)
        images = resized.round().clamp(0, 255).to(torch.uint8)
    elif side != size:
        box = torch.tensor([[0, 0, side, side]], device=images.device)
        images = resized_crop(images, box, size, preprocessing.interpolation)
    offset = round((size - preprocessing.size) / 2)
    window = slice(offset, offset + preprocessing.size)
    return images[:, :, window, window]


def resized_crop(images: Tensor, boxes: Tensor, size: int, interpolation: Interpolation = "bilinear") -> Tensor:
    """Crop each image, N x C x H x W uint8, to its box and resize it to `size` x `size`; returns uint8.

    `boxes` is N x 4: left, top, right, bottom. The filters are Pillow's, which average over a wider support when they
    downsample. Values differ from Pillow's by at most 2 with bilinear, which rounds only once here, and by at most 1
    with the others.
    """
    left, top, right, bottom = boxes.unbind(1)
    row_weights, column_weights = (
        _resize_weights(top, bottom, images.shape[2], size, interpolation),
        _resize_weights(left, right, images.shape[3], size, interpolation),
    )
    if interpolation == "bilinear":
        resized = row_weights @ images.float() @ column_weights.transpose(2, 3)
    else:
        # Pillow clips after each pass; the other filters overshoot, so the result depends on it.
        resized = row_weights @ (images.float() @ column_weights.transpose(2, 3)).round().clamp(0, 255)
    return resized.round().clamp(0, 255).to(torch.uint8)


def _resize_weights(start: Tensor, end: Tensor, length: int, size: int, interpolation: Interpolation) -> Tensor:
    """Return the interpolation matrix of one axis, N x 1 x size x length float32; each row sums to 1.

    It resamples the pixels `start` (inclusive) to `end` (exclusive), both of shape N, with a filter of Pillow's
    Resample.c.
    """
    start_pixel, end_pixel = start.view(-1, 1, 1, 1), end.view(-1, 1, 1, 1)
    scale = (end_pixel - start_pixel) / size
    centers = start_pixel + (torch.arange(size, device=start.device).view(-1, 1) + 0.5) * scale
    pixels = torch.arange(length, device=start.device)
    if interpolation == "nearest":
        centers_by_length = _nearest_centers(length, size, start.device)
        centers = centers_by_length.index_select(0, (end - start).view(-1)).view(-1, 1, size, 1)
        return (pixels == (start_pixel + centers).floor()).float()
    weights = _filter((pixels + 0.5 - centers).abs() / scale.clamp(min=1), interpolation)
    weights = weights * ((start_pixel <= pixels) & (pixels < end_pixel))
    return weights / weights.sum(-1, keepdim=True)


@lru_cache(maxsize=4)
def _nearest_centers(length: int, size: int, device: torch.device) -> Tensor:
    """Return the centers of `size` output pixels in boxes of 0 to `length` input pixels, (length + 1) x size float64.

    Pillow adds up float64 steps, whose rounding decides for a center between two pixels. CUDA adds in another order,
    and up to torch 2.11 its cumsum refuses to run with `device.deterministic`, so this is computed on the CPU.
    """
    steps = (torch.arange(length + 1, dtype=torch.float64) / size).view(-1, 1).repeat(1, size)
    steps[:, 0] /= 2
    return steps.cumsum(1).to(device)


def _filter(distance: Tensor, interpolation: Interpolation) -> Tensor:
    """Return a resampling filter at non-negative distances: triangle, Keys' cubic with a = -0.5, or Lanczos with three
    lobes."""
    if interpolation == "bicubic":
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        return torch.where(distance < 1, near, far) * (distance < 2)
    if interpolation == "lanczos":
        return torch.sinc(distance) * torch.sinc(distance / 3) * (distance < 3)
    return (1 - distance).clamp(min=0)


def resize_into(pixels: Images, plan: ResizePlan, out: Images) -> None:
    """Crop and resize C x H x W uint8 pixels of one image on the CPU to `out`, C x size x size uint8, bilinearly.

    torch's uint8 kernel is faster than Pillow's and releases the GIL. The result differs from Pillow's BILINEAR by at
    most 1. It is fastest if both arrays store the channels last.
    """
    left, top, right, bottom = plan.box
    cropped = np.ascontiguousarray(pixels[:, top:bottom, left:right].transpose(1, 2, 0)).transpose(2, 0, 1)
    is_whole = (plan.height, plan.width) == out.shape[1:]
    resized = out if is_whole else np.empty((plan.height, plan.width, len(out)), np.uint8).transpose(2, 0, 1)
    # F.interpolate has no `out`: its result would be allocated, and copied to the batch. 200 instead of 270 µs.
    torch.ops.aten._upsample_bilinear2d_aa.out(
        _to_batch(cropped), (plan.height, plan.width), False, out=_to_batch(resized)
    )
    if not is_whole:
        out[:] = resized[:, plan.top : plan.top + plan.size, plan.left : plan.left + plan.size]


def _to_batch(pixels: Images) -> torch.Tensor:
    return torch.from_numpy(pixels[None])


def pad_and_crop(images: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Zero-pad each image, N x C x H x W uint8, and crop it to its original size.

    `offsets` is N x 2: top row and left column of the crop in the padded image, 0 to 2 * padding.
    """
    count, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4).contiguous()
    padded_height, padded_width = padded.shape[2:]
    # View the padded batch as overlapping rows of `width` pixels, one per start position: index_select then copies
    # whole rows, which is several times faster than gathering single pixels.
    rows = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
    first_lines = torch.arange(0, count * channels * padded_height, padded_height, device=images.device).view(
        count, channels, 1
    )
    lines = first_lines + offsets[:, 0].view(-1, 1, 1) + torch.arange(height, device=images.device)
    starts = lines * padded_width + offsets[:, 1].view(-1, 1, 1)
    return rows.index_select(0, starts.flatten()).view(count, channels, height, width)


def flip(images: Tensor, mask: Tensor, dim: Literal[-1, -2] = -1, *, may_overwrite: bool = False) -> Tensor:
    """Flip the images for which `mask` (N, bool) is true: horizontally along dimension -1, vertically along -2.

    With `may_overwrite`, the result may be `images` themselves, which saves memory and the copy of the other images.
    """
    if images.device.type == "cpu" and images[:1].numel() >= MIN_SINGLE_COPY_BYTES:
        if may_overwrite and is_channels_last(images):
            for row in mask.nonzero()[:, 0].tolist():
                images[row].copy_(images[row].flip(dim))
            return images
        flipped = torch.empty_like(images)
        for image, copy, is_flipped in zip(images, flipped, mask.tolist(), strict=True):
            copy.copy_(image.flip(dim) if is_flipped else image)
        return flipped
    rows = torch.arange(len(images), device=images.device) + len(images) * mask
    # Copying whole images is several times faster than torch.where per pixel.
    if not is_channels_last(images):
        return torch.cat([images, images.flip(dim)]).index_select(0, rows)
    # index_select returns contiguous tensors, so it must see the channels as the last dimension to keep the format.
    pixels = images.permute(0, 2, 3, 1)
    return torch.cat([pixels, pixels.flip(dim - 1)]).index_select(0, rows).permute(0, 3, 1, 2)


def erase(images: Tensor, boxes: Tensor, fill: Sequence[int]) -> Tensor:
    """Fill the box of each image (N x 4: left, top, right, bottom) with `fill`, one value per channel, 0 to 255."""
    left, top, right, bottom = boxes.view(-1, 4, 1, 1).unbind(1)
    rows = torch.arange(images.shape[2], device=images.device).view(-1, 1)
    columns = torch.arange(images.shape[3], device=images.device)
    inside = (top <= rows) & (rows < bottom) & (left <= columns) & (columns < right)
    channels = [images[:, channel].masked_fill(inside, value) for channel, value in enumerate(fill)]
    return torch.stack(channels, 3).permute(0, 3, 1, 2) if is_channels_last(images) else torch.stack(channels, 1)


def is_channels_last(images: Tensor) -> bool:
    """Whether N x C x H x W images store the channels of a pixel side by side."""
    return images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


def channel_stats(image_format: ImageFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a format, 1 x C x 1 x 1 on a device, as `normalize` takes them."""
    mean, std = torch.tensor([image_format.mean, image_format.std], device=device).view(2, 1, -1, 1, 1)
    return mean, std


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalize N x C x H x W uint8 images to float32: (images / 255 - mean) / std.

    `mean` and `std` are 1 x C x 1 x 1 on the device of the images, on a scale of 0 to 1. Float images are returned
    unchanged: the user's dataset has normalized them.
    """
    if images.is_floating_point():
        return images
    return images.float().div_(255).sub_(mean).div_(std)
