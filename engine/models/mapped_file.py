"""Load a file of `torch.save` without reading the tensors that nobody uses.

`engine.training.checkpoint` loads checkpoints with it, `engine.models.transfer` the weights of other programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_mapped(path: Path) -> Any:
    """Return the content of a file with its tensors mapped into memory, or read where they cannot be mapped.

    No code in the file runs. Raises exceptions of any type if the content is damaged or not allowed.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        # torch before 1.6 wrote no ZIP archives, and mmap(2) fails with ENODEV on some FUSE file systems. What is
        # damaged fails again.
        return torch.load(path, map_location="cpu", weights_only=True)
