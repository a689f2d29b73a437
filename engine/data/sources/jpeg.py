"""Decode JPEG files with torchvision's compiled decoder, which is faster than Pillow.

Only its shared library is loaded: importing torchvision takes seconds, in each DataLoader worker.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.data.sources.base import Images
from engine.data.sources.resize import ResizePlan

# torchvision.io.ImageReadMode by Pillow mode.
_READ_MODES = {"L": 1, "RGB": 3}


def decode(data: bytes | memoryview, mode: str) -> Tensor | None:
    """Decode a JPEG to C x H x W uint8 in mode "L" or "RGB", without EXIF rotation.

    Returns None if the decoder is not installed or rejects the file. The caller then decodes with Pillow, which accepts
    more files.
    """
    decoder = _load_decoder()
    if decoder is None:
        return None
    try:
        pixels: Tensor = decoder(torch.frombuffer(bytearray(data), dtype=torch.uint8), _READ_MODES[mode], False)
    except RuntimeError:
        return None
    return pixels


def resized_crop(pixels: Tensor, plan: ResizePlan) -> Images:
    """Crop and resize C x H x W uint8 pixels to C x size x size uint8, bilinearly.

    The result differs from Pillow's BILINEAR by at most 1.
    """
    left, top, right, bottom = plan.box
    # torch's vectorized uint8 resize needs channels_last input, the layout in which the decoder returns its images.
    cropped = pixels[None, :, top:bottom, left:right].contiguous(memory_format=torch.channels_last)
    resized = F.interpolate(cropped, (plan.height, plan.width), mode="bilinear", antialias=True)[0].numpy()
    end_y, end_x = plan.top + plan.size, plan.left + plan.size
    return np.asarray(resized[:, plan.top : end_y, plan.left : end_x], np.uint8)


@cache
def _load_decoder() -> Any:
    package = find_spec("torchvision")
    for folder in (package.submodule_search_locations or []) if package else []:
        for library in sorted(Path(folder).glob("image*.so")):
            try:
                torch.ops.load_library(library)
                return torch.ops.image.decode_jpeg
            except (OSError, AttributeError):
                continue
    return None
