"""Names of GPUs on the screens: the index on this host, never the UUID where there is an index."""

from __future__ import annotations

from engine.gpus.snapshot import Gpu, Snapshot
from engine.utils.text import printable

SHORT_UUID_LENGTH = 12  # `GPU-` or `MIG-` and the first 8 digits


def gpu_name(device: str, snapshot: Snapshot | None) -> str:
    """Return the index of a GPU with this UUID, as in `3`; `3:1` for an instance of GPU 3 with GPU instance ID 1.

    A UUID that is not in `snapshot`, because the GPU is on another host, is shortened. Other devices are unchanged.
    """
    for gpu in snapshot.gpus if snapshot is not None else ():
        if gpu.uuid == device:
            return str(gpu.index)
        for instance in gpu.instances:
            if instance.uuid == device:
                return f"{gpu.index}:{instance.gpu_instance}"
    return printable(device[:SHORT_UUID_LENGTH] if device.startswith(("GPU-", "MIG-")) else device)


def gpu_key(gpu: Gpu) -> str:
    """Return the key of a GPU in lists: its UUID, or its index if the driver never reported a UUID."""
    return gpu.uuid or f"#{gpu.index}"
