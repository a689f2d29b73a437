"""timm's loader as its `train.py` creates it, without color jitter.

`use_prefetcher` is its default: the workers collate uint8 images, and the training process normalizes them on the
device.
"""

from __future__ import annotations

import torch
from task import REPEATS, SIZE, Batches, Task
from timm.data import create_dataset, create_loader


def batches(task: Task, option: str) -> Batches:
    dataset = create_dataset("", root=str(task.folder), is_training=True)
    dataset.reader.samples *= REPEATS
    loader = create_loader(
        dataset,
        (3, SIZE, SIZE),
        task.batch_size,
        is_training=True,
        color_jitter=0.0,
        num_workers=task.cores,
        device=torch.device("cpu"),
    )
    # Inside the PrefetchLoader: the uint8 batches that it copies to the device.
    return (images for images, _ in loader.loader)
