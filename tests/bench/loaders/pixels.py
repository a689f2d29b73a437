"""Compare gputrain's crops with those of Pillow and torchvision, pixel by pixel: `python pixels.py TASK`.

All decode the same bytes (of a folder, of tar shards, of packed ones) and crop the same boxes.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from task import SIZE, Task, random_box

sys.path.append(str(Path(__file__).resolve().parents[3]))

import gputrain_loader
import torch
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import functional as v2

from engine.data.sources.base import Box, CropSpec
from engine.data.sources.encoded import EncodedSource, decode_for_crop

NUM_PHOTOS = 300
Pixels = NDArray[np.uint8]


def with_pillow(data: bytes, box: Box) -> Pixels:
    """As torchvision's RandomResizedCrop on a Pillow image."""
    with Image.open(io.BytesIO(data)) as image:
        resized = image.crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return np.asarray(resized).transpose(2, 0, 1)


def with_torchvision(data: bytes, box: Box) -> Pixels:
    """As torchvision's RandomResizedCrop on a decoded tensor."""
    pixels = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    left, top, right, bottom = box
    resized = v2.resized_crop(pixels, top, left, bottom - top, right - left, [SIZE, SIZE], antialias=True)
    return np.asarray(resized.numpy())


def compare(task: Task, dataset: str) -> str:
    random.seed(0)
    config, source = gputrain_loader.open_dataset(task, dataset)
    assert isinstance(source, EncodedSource)
    boxes: dict[int, Box] = {}

    def draw_box(index: int, height: int, width: int) -> Box:
        return boxes.setdefault(index, random_box(width, height))

    crop = CropSpec(SIZE, draw_box, "bilinear")
    differences: dict[str, list[Pixels]] = {"Pillow": [], "torchvision.io": []}
    for index in range(min(NUM_PHOTOS, source.num_images("train"))):
        encoded = source.read_encoded("train", index)
        ours = decode_for_crop(encoded, index, gputrain_loader.input_format(config, source), crop)
        data = bytes(encoded.data)
        for name, theirs in (
            ("Pillow", with_pillow(data, boxes[index])),
            ("torchvision.io", with_torchvision(data, boxes[index])),
        ):
            differences[name].append(np.abs(ours.astype(np.int16) - theirs).astype(np.uint8))
    parts = []
    for name, levels in differences.items():
        every = np.stack(levels)
        parts.append(f"{name} max {every.max()}, mean {every.mean():.4f}, equal {(every == 0).mean():.2%}")
    return f"gray levels between gputrain, {dataset}, and {'; '.join(parts)}"


def main() -> None:
    task = Task.from_json(sys.argv[1])
    for dataset in ("folder", "packed", "tar"):
        try:
            print(compare(task, dataset), flush=True)
        except Exception as error:
            print(f"{dataset}: {error}", flush=True)


if __name__ == "__main__":
    main()
