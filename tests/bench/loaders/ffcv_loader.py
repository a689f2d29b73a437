"""FFCV's loader over its own file, as its ImageNet example (`train_imagenet.py` of ffcv-imagenet) creates it.

Options: "jpg" stores JPEGs of quality 90 only; "proportion" stores half of the images uncompressed, as that example
recommends (`write_imagenet.sh 500 0.50 90`), which takes several times the disk space and less decoding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from task import REPEATS, SIZE, Batches, Task
from torchvision.datasets import ImageFolder

MAX_SIDE, QUALITY, JPEG_SHARE = 500, 90, 0.5


def write(task: Task, path: Path, option: str) -> None:
    """Write the photos as an FFCV file."""
    field = RGBImageField(
        write_mode=option, max_resolution=MAX_SIDE, compress_probability=JPEG_SHARE, jpeg_quality=QUALITY
    )
    partial = path.with_suffix(".partial")
    writer = DatasetWriter(str(partial), {"image": field, "label": IntField()}, num_workers=task.cores)
    writer.from_indexed_dataset(ImageFolder(str(task.folder)))
    partial.rename(path)


def batches(task: Task, option: str) -> Batches:
    path = task.beton(option)
    if not path.exists():
        write(task, path, option)
    image_steps = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    loader = Loader(
        str(path),
        batch_size=task.batch_size,
        num_workers=task.cores,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        indices=np.tile(np.arange(len(task.files())), REPEATS),
        pipelines={"image": image_steps, "label": [IntDecoder(), ToTensor()]},
    )
    return (images for images, _ in loader)
