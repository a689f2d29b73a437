"""Random images in the IDX files of MNIST."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def write_mnist(root: Path, folder: str = "MNIST", train: int = 96, val: int = 40) -> NDArray[np.uint8]:
    """Write images whose labels count from 0 to 9; return those of training."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (train, 28, 28), np.uint8)
    for name, count in (("train", train), ("t10k", val)):
        sizes = np.array([count, 28, 28], ">i4").tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + images[:count].tobytes())
        labels = np.arange(count, dtype=np.uint8) % 10
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + labels.tobytes())
    return images
