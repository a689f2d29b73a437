"""Whether this host has a driver, and why a run with `device.gpus=auto` trains on the CPU of a host that has GPUs.

NVML may fail or be absent while the host has GPUs: after an update of the driver, or in a container. The files in /dev
show that they exist.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.base.errors import Problem
from engine.base.text import pluralize
from engine.gpus.selection import CudaDevice, why_not_free
from engine.gpus.snapshot import Snapshot

DEVICE_FILES = Path("/dev")
RUN_ON_CPU = "the run uses the CPU"
DOCTOR_ADVICE = "see `gputrain doctor`"


def has_driver_library() -> bool:
    """Whether the NVML library is installed. Loading it initializes nothing, and a sampler takes 0.25 s to start."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def gpu_device_files() -> list[Path]:
    """Return the files in /dev that exist on a host with NVIDIA GPUs, whether their driver works or not."""
    return sorted(DEVICE_FILES.glob("nvidia[0-9]*"))


def describe_cpu_fallback(
    snapshot: Snapshot | None, devices: Sequence[CudaDevice], environ: Mapping[str, str]
) -> Problem | None:
    """Return why no GPU is used, None if this host has none.

    `snapshot` is None without the NVML library, or if the driver does not answer. `devices` are the visible ones, none
    of which is usable.
    """
    if devices:
        advice = "wait for a GPU with --queue, or share GPUs by their indices with --gpus"
        if not any(device.usable(wait=True) for device in devices):
            advice = DOCTOR_ADVICE
        return Problem("", f"no GPU is free ({why_not_free(devices)}); {RUN_ON_CPU}", advice, code="gpu-fallback")
    if snapshot is not None and snapshot.gpus:
        gpus, variable = pluralize(len(snapshot.gpus), "GPU"), environ.get("CUDA_VISIBLE_DEVICES")
        if variable is None:
            reason = f"the driver reports no UUID of {gpus}; {RUN_ON_CPU}"
            return Problem("", reason, DOCTOR_ADVICE, code="gpu-fallback")
        reason = f"CUDA_VISIBLE_DEVICES={variable!r} hides {gpus} of this host; {RUN_ON_CPU}"
        return Problem("", reason, "unset it to use them", code="gpu-fallback")
    failure, files = describe_driver_failure(snapshot), gpu_device_files()
    if has_driver_library() and (snapshot is None or snapshot.pending):
        return Problem("", f"{failure}; {RUN_ON_CPU}", DOCTOR_ADVICE, code="gpu-fallback")
    if not files:
        return None
    reason = f"{failure}, but {files[0]} exists; {RUN_ON_CPU}"
    return Problem("", reason, DOCTOR_ADVICE, code="gpu-fallback")


def describe_driver_failure(snapshot: Snapshot | None) -> str:
    """Return why NVML reports no GPU; `snapshot` is that of a host without GPUs according to NVML, see above."""
    if not has_driver_library():
        # A container with `compute` alone has CUDA, but not NVML.
        advice = "; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility" if gpu_device_files() else ""
        return f"the NVIDIA driver is not available (libnvidia-ml.so.1 not found{advice})"
    if snapshot is not None and snapshot.error is None:
        return "the NVIDIA driver reports no GPU"
    return f"the NVIDIA driver is not available ({'no answer' if snapshot is None else snapshot.error})"
