"""WebDataset over tar shards, as its ImageNet example (`examples/train-resnet50-wds`) loads them.

Pillow decodes, torchvision's reference transforms crop.
"""

from __future__ import annotations

import webdataset as wds
from task import SIZE, Batches, Task
from torch import Tensor
from torchvision.transforms import v2

SHUFFLE_BUFFER = 1000


def batches(task: Task, option: str) -> Batches:
    transform = v2.Compose(
        [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor(), v2.ToPureTensor()]
    )
    dataset = (
        # resampled: an endless stream of shards, which also gives each worker some if there are fewer than workers.
        wds.WebDataset(task.tar, resampled=True, shardshuffle=True)
        .shuffle(SHUFFLE_BUFFER)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform, _unchanged)
        .batched(task.batch_size, partial=False)
    )
    loader = wds.WebLoader(dataset, batch_size=None, shuffle=False, num_workers=task.cores)
    images: Tensor
    for images, _ in loader:
        yield images


def _unchanged(label: int) -> int:
    return label
