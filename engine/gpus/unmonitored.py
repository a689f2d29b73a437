"""GPUs that torch sees on a host where NVML sees none: AMD's with ROCm, or NVIDIA's without a working NVML library.

`allocation` chooses from them. Their readings and processes are unknown, so only reservations show that one is in use.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from engine.gpus.queue_terms import WHOLE_DEVICES, QueueTerms
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.selection import CudaDevice, reserved_by, shared_with
from engine.gpus.snapshot import Snapshot
from engine.gpus.visible_devices import QUERY_TIMEOUT_SECONDS
from engine.utils.codec import Count, Record
from engine.utils.helper_process import HelperError, ask_helper

ROCM_DRIVER = Path("/dev/kfd")
DEVICE_FILES = Path("/dev")
# The GPUs of WSL 2 and of Jetson have no /dev/nvidia0. /dev/dxg exists without an NVIDIA GPU, too.
OTHER_DEVICE_FILES = ("dxg", "nvhost-gpu")
# https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
VISIBILITY_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "CUDA_DEVICE_ORDER",
)


class TorchGpu(Record, frozen=True, kw_only=True):
    """A GPU as torch sees it. ROCm cannot select one by its UUID, so there `physical_id` identifies it."""

    name: str
    uuid: str | None = None
    physical_id: str | None = None
    capability: tuple[Count, Count] | None = None


_answers: dict[tuple[str | None, ...], list[TorchGpu]] = {}


def unmonitored_gpus(environ: Mapping[str, str]) -> list[CudaDevice]:
    """Return the GPUs that torch sees under `environ`, in its order.

    An NVIDIA GPU has its UUID. For an AMD GPU, `uuid` is its entry of HIP_VISIBLE_DEVICES, because ROCm selects by
    index.
    """
    if not torch_may_see_gpus():
        return []
    key = tuple(environ.get(name) for name in VISIBILITY_VARIABLES)
    if key not in _answers:
        # Once per process: importing torch takes 2 s, and the form asks for each check of an edited config.
        try:
            _answers[key] = ask_helper(
                "engine.distributed.torch_gpus_process", list[TorchGpu], timeout_s=QUERY_TIMEOUT_SECONDS, env=environ
            )
        except (OSError, HelperError):
            return []
    return devices_from_answer(_answers[key], environ)


def gpus_unknown_to_nvml(snapshot: Snapshot | None) -> list[CudaDevice]:
    """Return the GPUs that torch sees although NVML sees none."""
    if snapshot is None:
        # A driver that does not answer NVML would not answer torch either.
        return [] if has_driver_library() else unmonitored_gpus(os.environ)
    return [] if snapshot.gpus or snapshot.pending else unmonitored_gpus(os.environ)


@cache
def torch_may_see_gpus() -> bool:
    """Whether torch may see GPUs that NVML does not report: AMD's, or NVIDIA's without a working NVML library."""
    if ROCM_DRIVER.exists():
        return True
    has_device_file = bool(gpu_device_files()) or any((DEVICE_FILES / name).exists() for name in OTHER_DEVICE_FILES)
    return has_library("libcuda.so.1") and (has_device_file or not has_driver_library())


def gpu_device_files() -> list[Path]:
    """Return the files in /dev that exist on a host with NVIDIA or AMD GPUs, whether their driver works or not."""
    files = sorted(DEVICE_FILES.glob("nvidia[0-9]*"))
    return [*files, ROCM_DRIVER] if ROCM_DRIVER.exists() else files


def devices_from_answer(answer: Sequence[TorchGpu], environ: Mapping[str, str]) -> list[CudaDevice]:
    """Return the devices that the helper process describes.

    Physical IDs that are not unique are ignored: partitions of an AMD GPU may have the same."""
    variable = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES")
    entries = [entry.strip() for entry in variable.split(",")] if variable else list(map(str, range(len(answer))))
    physical_ids = [gpu.physical_id for gpu in answer]
    return [
        CudaDevice(
            index,
            gpu.uuid or entry,
            gpu.name,
            None,
            capability=gpu.capability,
            physical_id=gpu.physical_id if physical_ids.count(gpu.physical_id) == 1 else None,
        )
        for index, (gpu, entry) in enumerate(zip(answer, entries, strict=False))
    ]


def mark_reserved(
    devices: Sequence[CudaDevice], reservations: Sequence[ReservationInfo], terms: QueueTerms = WHOLE_DEVICES
) -> list[CudaDevice]:
    """Return the devices, marked as unavailable if they are reserved, for a run with these terms."""
    marked = []
    for device in devices:
        sharers = len(shared_with(device.reservation_id, reservations, terms))
        unavailable = None if sharers else reserved_by(device.reservation_id, reservations)
        marked.append(replace(device, unavailable=unavailable, sharers=sharers))
    return marked


def has_driver_library() -> bool:
    """Whether the NVML library is installed. Starting a sampler only to find out would take 0.25 s."""
    return has_library("libnvidia-ml.so.1")


def has_library(name: str) -> bool:
    """Whether a library of a driver is installed. Loading it initializes nothing."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
