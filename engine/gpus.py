"""NVML: which GPUs there are, what they do, and which of them a run gets. All are known by UUID, in PCI order."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine.problems import UsageError


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in bytes, None where the driver does not tell; `computing` are the pids that compute on it."""

    index: int
    uuid: str
    name: str
    memory_used: int | None
    memory_total: int | None
    computing: tuple[int, ...]


class NoDriverError(Exception):
    """There is no NVIDIA driver to ask; the text says why."""


def list_gpus() -> list[Gpu]:
    """Every GPU of this host, in PCI order. Raises NoDriverError."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDriverError(f"no NVIDIA driver answers ({error})") from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_read(index, handle) for index, handle in enumerate(handles)]
    except pynvml.NVMLError as error:
        raise NoDriverError(f"the NVIDIA driver gave an error ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def _read(index: int, handle: object) -> Gpu:
    import pynvml

    used: int | None = None
    total: int | None = None
    computing: tuple[int, ...] = ()
    with suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        used, total = int(memory.used), int(memory.total)
    with suppress(pynvml.NVMLError):
        computing = tuple(int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return Gpu(
        index, _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle)), used, total, computing
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def visible(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """Those that an inherited CUDA_VISIBLE_DEVICES leaves: indices in PCI order, UUIDs or beginnings of them; as in
    CUDA, what follows the first entry that names nothing is left out."""
    if variable is None:
        return list(gpus)
    left: list[Gpu] = []
    for part in (part.strip() for part in variable.split(",")):
        found = [gpu for gpu in gpus if (part == str(gpu.index) or (part and gpu.uuid.startswith(part)))]
        if len(found) != 1:
            break
        left += found
    return left


def select(selection: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that `device.gpus` means among those that can be used; none means the CPU. Raises UsageError."""
    if selection == "cpu":
        return []
    free = sorted((gpu for gpu in gpus if not gpu.computing), key=lambda gpu: (gpu.memory_used or 0, gpu.index))
    if selection == "auto":
        return sorted(free, key=lambda gpu: gpu.index)
    there = (
        f"there are {', '.join(f'{gpu.index} ({gpu.name}, {gpu.uuid})' for gpu in gpus)}"
        if gpus
        else "there is no GPU here"
    )
    if selection == "all":
        if not gpus:
            raise UsageError.one("device.gpus", "all, but there is no GPU here; train on the CPU with --gpus cpu")
        return list(gpus)
    if match := re.fullmatch(r"free:(\d+)", selection):
        wanted = int(match[1])
        if wanted == 0:
            raise UsageError.one("device.gpus", "free:0 asks for no GPU; train on the CPU with --gpus cpu")
        if wanted > len(free):
            raise UsageError.one("device.gpus", f"{wanted} free GPUs are wanted and {len(free)} are free; {there}")
        return sorted(free[:wanted], key=lambda gpu: gpu.index)
    chosen: list[Gpu] = []
    for part in (part.strip() for part in selection.split(",")):
        found = [gpu for gpu in gpus if part == str(gpu.index) or (len(part) > 3 and gpu.uuid.startswith(part))]
        if not found:
            raise UsageError.one(
                "device.gpus", f"there is no GPU {part!r}; {there}; give auto, all, cpu, free:N, indices or UUIDs"
            )
        if len(found) > 1:
            raise UsageError.one("device.gpus", f"{part!r} could be several GPUs; {there}")
        if found[0] in chosen:
            raise UsageError.one("device.gpus", f"GPU {found[0].index} is named twice in {selection!r}")
        chosen += found
    return chosen


def choose(selection: str) -> list[Gpu]:
    """`select` among the GPUs of this host that CUDA_VISIBLE_DEVICES leaves. Raises UsageError."""
    if selection == "cpu":
        return []
    try:
        gpus = visible(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except NoDriverError as error:
        if selection == "auto":
            return []
        raise UsageError.one(
            "device.gpus", f"{selection} cannot be had: {error}; train on the CPU with --gpus cpu"
        ) from error
    return select(selection, gpus)
