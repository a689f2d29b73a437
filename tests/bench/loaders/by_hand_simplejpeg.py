"""The best loader that is written by hand in a few lines: simplejpeg, and torch's resize of the crop, in a DataLoader.

torch resizes uint8 images several times faster if their memory format is channels_last, which is how simplejpeg returns
them.
"""

from __future__ import annotations

from pathlib import Path

import simplejpeg
import torch
import torch.nn.functional as F
from task import SIZE, Batches, Task, random_box, random_flip
from torch import Tensor
from torch_dataset import Photos, load_batches


def crop(data: bytes) -> Tensor:
    """Decode a JPEG, and return a random crop, 3 x 224 x 224 uint8."""
    pixels = torch.from_numpy(simplejpeg.decode_jpeg(data))
    height, width = pixels.shape[:2]
    left, top, right, bottom = random_box(width, height)
    # The batch dimension first: the result of permute(2, 0, 1)[None] does not count as channels_last.
    cropped = pixels[None, top:bottom, left:right].permute(0, 3, 1, 2)
    image = F.interpolate(cropped, (SIZE, SIZE), mode="bilinear", antialias=True)[0]
    return image.flip(-1) if random_flip() else image


def load(path: Path) -> Tensor:
    return crop(path.read_bytes())


def batches(task: Task, option: str) -> Batches:
    return load_batches(task, Photos(task, load))
