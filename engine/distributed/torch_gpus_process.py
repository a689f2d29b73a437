"""Helper process of `engine.gpus.unmonitored`: lists the GPUs that torch sees."""

from __future__ import annotations

from typing import Any

import torch

from engine.gpus.unmonitored import TorchGpu
from engine.utils.helper_process import ParentPipe


def main(parent: ParentPipe) -> None:
    """Send the name and the UUID of each GPU; with ROCm, which cannot select a GPU by it, a physical ID instead."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    parent.send(
        [
            TorchGpu(name=gpu.name, physical_id=physical_id(gpu))
            if torch.version.hip
            else TorchGpu(name=gpu.name, uuid=f"GPU-{gpu.uuid}", capability=(gpu.major, gpu.minor))
            for gpu in gpus
        ]
    )


def physical_id(gpu: Any) -> str:
    """Return an ID that no visibility variable and no cgroup changes: the PCI address and the UUID of the GPU.

    ROCm reports the same UUID for all GPUs that have none.
    """
    domain, bus, device = (getattr(gpu, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return f"PCI-{domain:04x}:{bus:02x}:{device:02x}-{gpu.uuid}"
