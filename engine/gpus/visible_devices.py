"""Devices that remain visible under an inherited CUDA_VISIBLE_DEVICES. Called by `allocation` and `engine.jobs.doctor`.

The rules are CUDA's: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from engine.base.errors import UsageError
from engine.gpus.selection import CudaDevice

VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def visible_devices(devices: Sequence[CudaDevice], environ: Mapping[str, str]) -> list[CudaDevice]:
    """Return the devices that CUDA would enumerate under CUDA_VISIBLE_DEVICES, in its order.

    Entries are UUIDs, unique prefixes of UUIDs, or indices. As in CUDA, the first invalid entry hides itself and all
    entries after it. Indices follow the PCI bus order if CUDA_DEVICE_ORDER=PCI_BUS_ID or all GPUs are of one model.
    Otherwise CUDA sorts by speed, which it alone knows. Raises UsageError.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return list(devices)
    parts = [part.strip() for part in variable.split(",")]
    in_pci_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.name for device in devices}) < 2
    if not in_pci_order and any(part.isdigit() for part in parts):
        reason = f"{variable!r} has indices in CUDA's order of speed, and this host has GPUs of several models"
        advice = "use UUIDs, or set CUDA_DEVICE_ORDER=PCI_BUS_ID if you mean the indices of nvidia-smi"
        raise UsageError.one("CUDA_VISIBLE_DEVICES", reason, advice, code="ambiguous-name")
    visible: list[CudaDevice] = []
    for part in parts:
        matches = _match(part, devices)
        # For a GPU in MIG mode, CUDA selects its first instance.
        if not matches or len({device.index for device in matches}) > 1 or matches[0] in visible:
            break
        visible.append(matches[0])
    return visible


def show_devices(uuids: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Make these devices the only ones that CUDA enumerates, in this order, in a process with this environment."""
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)


def _match(part: str, devices: Sequence[CudaDevice]) -> list[CudaDevice]:
    if part.isdigit():
        return [device for device in devices if int(part) == device.index]
    return [
        device
        for device in devices
        if part.startswith(("GPU-", "MIG-"))
        and (device.uuid.startswith(part) or (device.parent_uuid or "").startswith(part))
    ]
