"""TorchCodec's JPEG decoder, and torchvision's transforms on its tensors, in a DataLoader.

As torchvision's deprecation note of `torchvision.io` recommends; `torchcodec.decoders.decode_image` is its replacement.
"""

from __future__ import annotations

from pathlib import Path

from task import SIZE, Batches, Task
from torch import Tensor
from torch_dataset import Photos, load_batches
from torchcodec.decoders import decode_jpeg
from torchvision.transforms import v2


def batches(task: Task, option: str) -> Batches:
    transform = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])

    def load(path: Path) -> Tensor:
        image: Tensor = transform(decode_jpeg(path))
        return image

    return load_batches(task, Photos(task, load))
