"""Helper process of `engine.gpus.unmonitored`: lists the GPUs that torch sees."""

from __future__ import annotations

import torch

from engine.utils.helper_process import ParentPipe


def main(parent: ParentPipe) -> None:
    """Send the name and the UUID of each GPU; no UUID with ROCm, which cannot select a GPU by it."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    parent.send([{"name": gpu.name, "uuid": None if torch.version.hip else f"GPU-{gpu.uuid}"} for gpu in gpus])
