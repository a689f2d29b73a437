"""What every loader of `tests/bench/input.py` does: the files it may read, the crop it applies, the cores it may use.

A loader is a module of this folder with a function `batches(task, option)`. It yields an endless stream of batches, N x
3 x 224 x 224 uint8: random resized crops, half of them flipped, before normalization.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

SIZE = 224
# torchvision's RandomResizedCrop: share of the area, and range of the aspect ratio.
CROP_SCALE, CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
# A loader without an endless sampler reads the photos this many times per epoch, so that no measurement has the end
# of an epoch in it: 3,000 photos are 400 times shorter than ImageNet.
REPEATS = 100

Batches = Iterator[Tensor]
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Task:
    """Where the photos are, in one folder for all formats, and how many cores and images per batch a loader has."""

    root: Path
    cores: int
    batch_size: int

    @property
    def folder(self) -> Path:
        """A folder of JPEG files per class."""
        return self.root / "folder"

    @property
    def tar(self) -> str:
        """WebDataset shards with the same files."""
        return str(self.root / "train-{000..002}.tar")

    @property
    def packed(self) -> Path:
        """The output of `gputrain data pack --max-side 500`, which encodes the photos again."""
        return self.root / "packed"

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.jpg"))

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "root": str(self.root)})

    @classmethod
    def from_json(cls, text: str) -> Task:
        fields = json.loads(text)
        return cls(Path(fields["root"]), fields["cores"], fields["batch_size"])


def random_box(width: int, height: int) -> Box:
    """Return the box of a random resized crop, left, top, right and bottom, as torchvision draws it."""
    for _ in range(10):
        area = random.uniform(*CROP_SCALE) * width * height
        ratio = math.exp(random.uniform(*map(math.log, CROP_RATIO)))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = random.randint(0, width - box_width), random.randint(0, height - box_height)
            return left, top, left + box_width, top + box_height
    return 0, 0, width, height


def random_flip() -> bool:
    return random.random() < 0.5
