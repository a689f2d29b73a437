"""The memory of a rank's GPU: the most that was taken, told to rank 0, and what is cached given back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engine.runs.records import RankPeakMemory


def peak_memory(device: torch.device) -> dict[str, int]:
    """Bytes at their most since `reset_peak_memory`: `allocated` by tensors, `reserved` by torch for them, on the first
    GPU of a rank, which has the most where it has several. Empty on the CPU, whose memory torch does not count."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def gather_peak_memory(device: torch.device, rank: int, cpu_group: dist.ProcessGroup) -> list[RankPeakMemory]:
    """The peaks of all ranks, on rank 0; none elsewhere, nor on the CPU, where it is no collective.
    A collective on `cpu_group`, a group for what lies in host memory."""
    if device.type != "cuda":
        return []
    ranks: list[RankPeakMemory | None] | None = [None] * dist.get_world_size(cpu_group) if rank == 0 else None
    dist.gather_object(RankPeakMemory(rank, **peak_memory(device)), ranks, group=cpu_group)
    return [one for one in ranks or [] if one is not None]


def empty_cache(device: torch.device) -> None:
    """Let other processes have what torch has cached and does not use, on all GPUs of this process."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def manual_gc() -> Iterator[Callable[[], None]]:
    """Nothing is collected but by the function that this gives. It does not look at what is there already: to go
    through all that was imported takes a tenth of a second. Objects in no cycle go when they are no longer used, as
    ever. Afterwards all is as before."""
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield _collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _collect() -> None:
    gc.collect()
