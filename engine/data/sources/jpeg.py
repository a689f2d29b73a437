"""JPEG files decoded to tensors by torchvision's compiled decoder, which is faster than Pillow's way to an array. Its
library is loaded by itself: to import torchvision takes seconds, which each loader process would need."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.data.sources.base import Box, Images

# torchvision.io.ImageReadMode, by Pillow's names.
_READ_MODES = {"L": 1, "RGB": 3}


def decode(data: bytes, mode: str) -> Tensor | None:
    """C x H x W of uint8, grey ("L") or colour ("RGB"), not turned by what EXIF says; None where the decoder is not
    there, or does not like the file: whether a file is sound is for Pillow to say, which takes more of them."""
    decoder = _load_decoder()
    if decoder is None:
        return None
    try:
        pixels: Tensor = decoder(torch.frombuffer(bytearray(data), dtype=torch.uint8), _READ_MODES[mode], False)
    except RuntimeError:
        return None
    return pixels


def resized_crop(pixels: Tensor, size: int, box: Box) -> Images:
    """That part of C x H x W brought to `size` x `size`, as Pillow's bilinear filter does it, to one level."""
    left, top, right, bottom = box
    # torch's fast code for bytes is for whole images with their channels last, as the decoder gives them.
    part = pixels[None, :, top:bottom, left:right].contiguous(memory_format=torch.channels_last)
    made = F.interpolate(part, (size, size), mode="bilinear", antialias=True)[0].numpy()
    return np.asarray(made, np.uint8)


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
