"""Crop and resize decoded images with torch, whose uint8 kernel is faster than Pillow's and releases the GIL."""

from __future__ import annotations

import numpy as np
import torch

from engine.data.sources.base import Images
from engine.data.sources.resize import ResizePlan


def resize_into(pixels: Images, plan: ResizePlan, out: Images) -> None:
    """Crop and resize C x H x W uint8 pixels to `out`, C x size x size uint8, bilinearly.

    The result differs from Pillow's BILINEAR by at most 1. It is fastest if both arrays store the channels last.
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
