"""Memory of a rank: peak GPU memory, freed host memory, and when Python collects garbage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from engine.distributed.collectives import gather
from engine.runs.records import RankPeakMemory


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def gather_peak_memory(device: torch.device, cpu_group: dist.ProcessGroup) -> list[RankPeakMemory]:
    """Return the peak bytes of all ranks, allocated by tensors and reserved by the caching allocator, since
    `reset_peak_memory`: on rank 0, nothing on other ranks or on the CPU. A collective on GPUs.

    With several GPUs (DataParallel) it is that of the first, which uses the most.
    """
    if device.type != "cuda":
        return []
    own = torch.tensor([torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)])
    ranks = gather(own, cpu_group)
    return [RankPeakMemory(index, *values.tolist()) for index, values in enumerate(ranks)]


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
