"""Devices that remain visible under an inherited CUDA_VISIBLE_DEVICES. Called by `allocation` and `engine.doctor`.

The rules are CUDA's: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from engine.gpus.selection import CudaDevice
from engine.utils.errors import Problem, UsageError
from engine.utils.helper_process import HelperError, ParentPipe, ask_helper

QUERY_TIMEOUT_SECONDS = 60.0
UUID_BYTES = 16


def visible_devices(
    devices: Sequence[CudaDevice],
    environ: Mapping[str, str],
    query_cuda: Callable[[Mapping[str, str]], list[str]] | None = None,
) -> list[CudaDevice]:
    """Return the devices that CUDA would enumerate under CUDA_VISIBLE_DEVICES, in its order.

    Entries are UUIDs, unique prefixes of UUIDs, or indices. As in CUDA, the first invalid entry hides itself and all
    entries after it. Indices follow the PCI bus order if CUDA_DEVICE_ORDER=PCI_BUS_ID or all GPUs are of one model.
    Otherwise CUDA sorts by speed, and `query_cuda` gets its order from a helper process. Raises UsageError if it fails.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return list(devices)
    parts = [part.strip() for part in variable.split(",")]
    in_pci_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.name for device in devices}) < 2
    if not in_pci_order and any(part.isdigit() for part in parts):
        cuda_uuids_in_order = (query_cuda or query_cuda_uuids)(environ)
        by_cuda = (
            next((device for device in devices if cuda_uuid in (device.uuid, device.parent_uuid)), None)
            for cuda_uuid in cuda_uuids_in_order
        )
        return [device for device in by_cuda if device is not None]
    visible: list[CudaDevice] = []
    for part in parts:
        matches = _match(part, devices)
        # For a GPU in MIG mode, CUDA selects its first instance.
        if not matches or len({device.index for device in matches}) > 1 or matches[0] in visible:
            break
        visible.append(matches[0])
    return visible


def device_order_warnings(selection: str, devices: Sequence[CudaDevice], environ: Mapping[str, str]) -> list[Problem]:
    """Return that the indices of a `device.gpus` are not those of CUDA, if the user has set CUDA's other order."""
    indices = [part.strip() for part in selection.split(",") if part.strip().isdigit()]
    if environ.get("CUDA_DEVICE_ORDER") != "FASTEST_FIRST" or len({device.name for device in devices}) < 2:
        return []
    named = [f"{device.index} is {device.name}" for device in devices if str(device.index) in indices]
    if not named:
        return []
    reason = f"indices are in PCI bus order, not in that of CUDA_DEVICE_ORDER=FASTEST_FIRST: {', '.join(named)}"
    return [Problem("device.gpus", reason, "if you mean another GPU, name it by its UUID", code="ambiguous-name")]


def show_devices(uuids: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Make these devices the only ones that CUDA enumerates, in this order, in a process with this environment."""
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    if "HIP_VISIBLE_DEVICES" in environ:
        # ROCm prefers it to CUDA_VISIBLE_DEVICES.
        environ["HIP_VISIBLE_DEVICES"] = environ["CUDA_VISIBLE_DEVICES"]


def _match(part: str, devices: Sequence[CudaDevice]) -> list[CudaDevice]:
    if part.isdigit():
        return [device for device in devices if int(part) == device.index]
    return [
        device
        for device in devices
        if part.startswith(("GPU-", "MIG-"))
        and (device.uuid.startswith(part) or (device.parent_uuid or "").startswith(part))
    ]


def query_cuda_uuids(environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the devices that CUDA enumerates under `environ`, in CUDA's order.

    Runs in a child process, because cuInit() cannot be undone. Raises UsageError if CUDA cannot be queried.
    """
    try:
        return ask_helper("engine.gpus.visible_devices", list[str], timeout_s=QUERY_TIMEOUT_SECONDS, env=environ)
    except (OSError, HelperError) as error:
        raise UsageError.one(
            "CUDA_VISIBLE_DEVICES",
            f"{environ.get('CUDA_VISIBLE_DEVICES')!r} contains CUDA device indices, and CUDA could not be queried for "
            "their order",
            "use UUIDs, or set CUDA_DEVICE_ORDER=PCI_BUS_ID",
            code="driver-unavailable",
        ) from error


def cuda_uuids() -> list[str]:
    """Return the UUIDs of all CUDA devices, through the CUDA driver API in this process. Raises OSError."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise OSError(f"{name} failed with CUDA error {code}")

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    uuids = []
    for ordinal in range(count.value):
        device, raw = ctypes.c_int(), (ctypes.c_ubyte * UUID_BYTES)()
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDeviceGetUuid", ctypes.byref(raw), device)
        uuids.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
    return uuids


def main(parent: ParentPipe) -> None:
    """Entry point of the helper process of `query_cuda_uuids`."""
    parent.send(cuda_uuids())
