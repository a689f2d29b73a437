"""The memory of a GPU that nobody uses or has reserved, for runs that reserve memory instead of whole GPUs.

Called by `selection`. A reservation counts from its start, when the run may not have allocated anything yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.gpus.current_use import memory_holders
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.snapshot import Gpu, MigInstance


def unreserved_bytes(gpu: Gpu, instance: MigInstance | None, holders: Sequence[ReservationInfo]) -> int | None:
    """Return the memory that is neither in use nor reserved by `holders`, None if NVML does not report memory.

    A run counts with what it has reserved (`min_free`), or with what its listed processes use if that is more. All
    other memory in use counts as that of others. In a container, where NVML lists no processes, a run that has started
    therefore counts twice: whose memory it is cannot be known, and a GPU must not be promised to two runs.
    """
    capacity, used = capacity_bytes(gpu, instance), (gpu if instance is None else instance).memory_used.value
    if capacity is None or used is None:
        return None
    listed, not_allocated = memory_holders(gpu, instance), 0
    for run in holders:
        # Any other process of its user may not be of the run, so before a run has published its ranks it counts twice.
        own = (each for each in listed if each.run == run.run and each.user.value in (None, run.user))
        not_allocated += max(run.min_free - sum(each.gpu_memory.value or 0 for each in own), 0)
    return max(int(capacity - used - not_allocated), 0)


def capacity_bytes(gpu: Gpu, instance: MigInstance | None) -> int | None:
    """Return the memory that runs can have while nobody else uses any, None if NVML does not report it."""
    if instance is not None:
        return instance.memory_total.value
    total: int | None = gpu.memory_total.value
    return None if total is None else total - (gpu.memory_reserved.value or 0)
