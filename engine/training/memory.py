"""Memory of a rank: peak GPU memory, torch's cached GPU memory, and when Python collects garbage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from engine.distributed.collectives import gather
from engine.runs.records import RankPeakMemory


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the peak bytes `allocated` by tensors and `reserved` by the caching allocator since `reset_peak_memory`.

    With several GPUs (DataParallel) it is that of the first, which uses the most. Empty on the CPU.
    """
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def gather_peak_memory(device: torch.device, cpu_group: dist.ProcessGroup) -> list[RankPeakMemory]:
    """Return the peak memory of all ranks on rank 0, nothing on other ranks or on the CPU. A collective on GPUs."""
    if device.type != "cuda":
        return []
    ranks = gather(torch.tensor([*peak_memory(device).values()]), cpu_group)
    return [RankPeakMemory(index, *values.tolist()) for index, values in enumerate(ranks)]


def empty_cache(device: torch.device) -> None:
    """Release the unused cached memory on all GPUs of this process, so that other processes can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def release_free_memory() -> None:
    """Return freed host memory to the system (malloc_trim(3)). The C library would keep it for this process."""
    # AttributeError: another C library than glibc.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def manual_gc() -> Iterator[None]:
    """Disable automatic garbage collection, so that the ranks collect at the same steps.

    Existing objects are frozen (`gc.freeze`), because traversing everything that is imported takes 0.1 s. On exit the
    previous state is restored.
    """
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
