"""torchvision's reference training: `references/classification/presets.py` and `train.py`.

Options: "pil" and "tensor" are its `--backend`; both open files with Pillow, as `ImageFolder` does. "io" decodes with
`torchvision.io.decode_image` instead, the fastest of torchvision itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchvision
from task import REPEATS, SIZE, Batches, Task
from torch_dataset import load_batches
from torchvision.io import ImageReadMode, decode_image, read_file
from torchvision.transforms import v2


def batches(task: Task, option: str) -> Batches:
    # ClassificationPresetTrain(crop_size=224, interpolation=bilinear, hflip_prob=0.5) without ToDtype and Normalize.
    crop = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    steps: list[Callable[..., Any]] = crop
    if option == "pil":
        steps = [*crop, v2.PILToTensor()]
    elif option == "tensor":
        steps = [v2.PILToTensor(), *crop]
    transform = v2.Compose([*steps, v2.ToPureTensor()])
    if option == "io":
        dataset = torchvision.datasets.ImageFolder(str(task.folder), transform, loader=_decode)
    else:
        dataset = torchvision.datasets.ImageFolder(str(task.folder), transform)
    dataset.samples *= REPEATS
    return load_batches(task, dataset)


def _decode(path: str) -> Any:
    return decode_image(read_file(path), ImageReadMode.RGB)
