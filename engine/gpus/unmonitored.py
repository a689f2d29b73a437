"""GPUs that torch sees on a host where NVML sees none: AMD's with ROCm, or NVIDIA's without the NVML library.

`allocation` chooses from them. Their readings and processes are unknown, so only reservations show that one is in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.gpus.reservation import ReservationInfo
from engine.gpus.selection import CudaDevice, reserved_by
from engine.utils.helper_process import HelperError, ask_helper

QUERY_TIMEOUT_SECONDS = 60.0
ROCM_DRIVER = Path("/dev/kfd")


def unmonitored_gpus(environ: Mapping[str, str]) -> list[CudaDevice]:
    """Return the GPUs that torch sees under `environ`, in its order. It is asked in a helper process.

    An NVIDIA GPU has its UUID. For an AMD GPU, `uuid` is its entry of HIP_VISIBLE_DEVICES, because ROCm selects by
    index.
    """
    # Without AMD's driver, and without a CUDA that NVML does not report, torch sees none: its import takes 2 s.
    if not ROCM_DRIVER.exists() and (has_library("libnvidia-ml.so.1") or not has_library("libcuda.so.1")):
        return []
    try:
        answer = ask_helper("engine.distributed.torch_gpus_process", timeout_s=QUERY_TIMEOUT_SECONDS, env=environ)
    except (OSError, HelperError):
        return []
    return devices_from_answer(answer, environ)


def devices_from_answer(answer: Sequence[Mapping[str, Any]], environ: Mapping[str, str]) -> list[CudaDevice]:
    """Return the devices that the helper process describes: "name", and "uuid" or None, of each GPU."""
    variable = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES")
    entries = [entry.strip() for entry in variable.split(",")] if variable else list(map(str, range(len(answer))))
    return [
        CudaDevice(index, gpu["uuid"] or entry, gpu["name"], None)
        for index, (gpu, entry) in enumerate(zip(answer, entries, strict=False))
    ]


def mark_reserved(devices: Sequence[CudaDevice], reservations: Sequence[ReservationInfo]) -> list[CudaDevice]:
    """Return the devices, marked as unavailable if they are reserved."""
    return [replace(device, unavailable=reserved_by(device.uuid, reservations)) for device in devices]


def has_library(name: str) -> bool:
    """Whether a library of a driver is installed. Loading it initializes nothing."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
