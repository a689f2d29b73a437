"""What an inherited CUDA_VISIBLE_DEVICES leaves of a host's GPUs.

The rules are CUDA's: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Mapping, Sequence

from engine.gpus.selection import CudaDevice
from engine.utils.errors import UsageError
from engine.utils.helper_process import HelperError, ParentPipe, ask_helper

QUERY_TIMEOUT_SECONDS = 60.0
UUID_BYTES = 16


def visible_devices(
    devices: Sequence[CudaDevice],
    environ: Mapping[str, str],
    query_cuda: Callable[[Mapping[str, str]], list[str]] | None = None,
) -> list[CudaDevice]:
    """The devices that CUDA would show, in its order: by UUID, a unique beginning of one, or index; what follows the
    first entry that names nothing is left out. CUDA's indices are PCI's where CUDA_DEVICE_ORDER says so or all cards
    are alike; else CUDA is asked (`query_cuda`), in a helper process. Raises UsageError where it does not
    answer."""
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return list(devices)
    parts = [part.strip() for part in variable.split(",")]
    in_pci_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.name for device in devices}) < 2
    if not in_pci_order and any(part.isdigit() for part in parts):
        shown = (query_cuda or query_cuda_uuids)(environ)
        by_cuda = (
            next((device for device in devices if one in (device.uuid, device.parent_uuid)), None) for one in shown
        )
        return [device for device in by_cuda if device is not None]
    left: list[CudaDevice] = []
    for part in parts:
        found = _match(part, devices)
        # Of a divided GPU CUDA takes the first instance.
        if not found or len({device.index for device in found}) > 1 or found[0] in left:
            break
        left.append(found[0])
    return left


def _match(part: str, devices: Sequence[CudaDevice]) -> list[CudaDevice]:
    if part.isdigit():
        return [device for device in devices if int(part) == device.index]
    # An older name of an instance: MIG-GPU-<uuid>/<GPU instance>/<compute instance>.
    old = [device for device in devices if device.parent_uuid and part == f"MIG-{device.parent_uuid}/{device.mig_ids}"]
    begun = [
        device
        for device in devices
        if part.startswith(("GPU-", "MIG-"))
        and (device.uuid.startswith(part) or (device.parent_uuid or "").startswith(part))
    ]
    return old or begun


def query_cuda_uuids(environ: Mapping[str, str]) -> list[str]:
    """The UUIDs of what CUDA shows under these variables, in its order. In a child process, because setting CUDA up
    cannot be undone. Raises UsageError."""
    try:
        return [
            str(one) for one in ask_helper("engine.gpus.visible_devices", timeout_s=QUERY_TIMEOUT_SECONDS, env=environ)
        ]
    except (OSError, HelperError) as error:
        raise UsageError.one(
            "CUDA_VISIBLE_DEVICES",
            f"{environ.get('CUDA_VISIBLE_DEVICES')!r} names GPUs by CUDA's order, which the driver does not tell",
            "name them by UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        ) from error


def cuda_uuids() -> list[str]:
    """Asks CUDA itself, in this process. Raises OSError."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def ask(name: str, *arguments: object) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise OSError(f"{name} gave error {code}")

    ask("cuInit", 0)
    count = ctypes.c_int()
    ask("cuDeviceGetCount", ctypes.byref(count))
    found = []
    for ordinal in range(count.value):
        device, raw = ctypes.c_int(), (ctypes.c_ubyte * UUID_BYTES)()
        ask("cuDeviceGet", ctypes.byref(device), ordinal)
        ask("cuDeviceGetUuid", ctypes.byref(raw), device)
        found.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
    return found


def main(parent: ParentPipe) -> None:
    """The helper process of `query_cuda_uuids`."""
    parent.send(cuda_uuids())
