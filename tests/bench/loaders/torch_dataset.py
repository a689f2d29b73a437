"""The photos as a map-style dataset, and the `DataLoader` that runs one worker per core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from task import REPEATS, Batches, Task
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset[tuple[Tensor, int]]):
    """A photo, loaded and cropped by `load`, and its label."""

    def __init__(self, task: Task, load: Callable[[Path], Tensor]) -> None:
        self._load = load
        self._files = [(file, int(file.parent.name.removeprefix("class-"))) for file in task.files()] * REPEATS

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self._files[index]
        return self._load(file), label


def load_batches(task: Task, dataset: Dataset[tuple[Tensor, int]]) -> Batches:
    loader = DataLoader(dataset, task.batch_size, shuffle=True, num_workers=task.cores, drop_last=True)
    return (images for images, _ in loader)
