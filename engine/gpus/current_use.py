"""Whether a GPU or a MIG instance is in use, judged by the processes and the memory that NVML reports.

Called by `selection`, `engine.jobs.doctor` and the user interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.snapshot import Gpu, GpuProcess, MigInstance, Missing

# Memory in use beyond that of the listed processes. More than an idle CUDA context takes, less than any training, so a
# GPU above it is in use by a process that NVML does not list, for example in another container.
MAX_UNATTRIBUTED_BYTES = 1 << 30
# The same for a GPU that a desktop may use, or whose driver lists no processes: such memory, at so little utilization,
# is that of a desktop and its browser. A training takes more of either.
MAX_DESKTOP_MEMORY_SHARE, MAX_DESKTOP_BYTES = 0.25, 4 << 30
MAX_DESKTOP_UTIL_PERCENT = 30.0
DESKTOP_USERS = {"desktop": "the desktop", "Windows": "Windows"}  # of the reading `display`
UNKNOWN_USER = "unknown"
NO_EVIDENCE = "the driver reports neither its processes nor its memory use"
NO_MEMORY_EVIDENCE = "the driver lists no process, and reports neither its memory use nor its utilization"
NO_INSTANCES = "in MIG mode without an instance, so CUDA sees no device on it"


class Obstacle(StrEnum):
    """Why a device is not free."""

    IN_USE = "in use"
    RESERVED = "reserved"
    QUEUED = "queued"
    """A run that is earlier in the queue is waiting for it."""
    UNKNOWN = "unknown"
    """NVML reports neither its processes nor its memory use."""
    STALE = "stale"
    """It currently does not answer."""
    LOST = "lost"
    MEMORY = "memory"
    """It has less memory left than the run reserves."""
    NO_INSTANCES = "no MIG instances"
    TOO_SMALL = "too small"
    """It has less memory than the run reserves, whoever uses it."""


@dataclass(frozen=True)
class Unavailable:
    """Why a device is not free. The `message` names the run or the user who uses it.

    `users` are those who may free the device: nobody if it is broken, or if a supervisor that does not answer holds
    it."""

    obstacle: Obstacle
    message: str
    users: frozenset[str] = field(default=frozenset(), compare=False)


def find_current_use(
    gpu: Gpu, instance: MigInstance | None = None, sharers: Sequence[ReservationInfo] = ()
) -> Unavailable | None:
    """Return why a GPU, or one of its MIG instances, is in use according to NVML, None if it is not.

    A GPU counts as in use if it has a compute process, or more memory in use beyond that of its listed processes than
    MAX_UNATTRIBUTED_BYTES, or than a desktop takes where there may be one. Without its memory use, its utilization
    decides: in a container, the driver lists no process. A GPU whose processes and memory use may not be read is not
    free, one whose driver cannot tell them is while it computes little. The processes and the memory of `sharers` do
    not count.
    """
    if (without_instances := find_missing_instances(gpu)) is not None:
        return without_instances
    if _is_opaque(gpu, instance) and (_may_compute(gpu) or gpu.processes.reason != Missing.NOT_SUPPORTED):
        return Unavailable(Obstacle.UNKNOWN, f"{NO_EVIDENCE} ({gpu.processes.reason})")
    compute_processes = [
        process
        for process in (gpu.processes.value or () if instance is None else processes_on(gpu, instance))
        if process.kind == "compute" and not _belongs_to(process, sharers)
    ]
    if compute_processes:
        first, users = compute_processes[0], frozenset(each.user.value or UNKNOWN_USER for each in compute_processes)
        user = f"(user {first.user.value or UNKNOWN_USER})"
        if first.run is not None:
            return Unavailable(Obstacle.IN_USE, f"in use by run {first.run} {user}", users)
        return Unavailable(Obstacle.IN_USE, f"in use by other processes {user}", users)
    if sharers:
        # In a container, NVML lists no processes, and all memory would count as that of others.
        return None
    if _memory_used(gpu, instance) is None and gpu.processes.value is not None and _may_compute(gpu):
        if gpu.value("util") is None:
            return Unavailable(Obstacle.UNKNOWN, NO_MEMORY_EVIDENCE)
        return Unavailable(Obstacle.IN_USE, "utilization by processes that the driver does not list here")
    has_desktop = instance is None and _may_have_desktop(gpu)
    if _unattributed_bytes(gpu, instance) <= (_desktop_limit_bytes(gpu) if has_desktop else MAX_UNATTRIBUTED_BYTES):
        return None
    desktop = ", or by a desktop" if has_desktop else ""
    message = f"memory in use by processes that the driver does not list here{desktop}"
    # A desktop never leaves.
    users = frozenset[str]() if has_desktop else frozenset({UNKNOWN_USER})
    return Unavailable(Obstacle.IN_USE, message, users)


def find_missing_instances(gpu: Gpu) -> Unavailable | None:
    """Return that a GPU in MIG mode has no instance, None if it has one or is in another mode."""
    has_none = gpu.state == "ok" and gpu.mig_enabled and not gpu.instances
    return Unavailable(Obstacle.NO_INSTANCES, NO_INSTANCES) if has_none else None


def find_doubt(gpu: Gpu) -> str:
    """Return why a GPU that counts as free may be in use: the driver does not tell, or a desktop takes memory; else
    ""."""
    if _is_opaque(gpu):
        return NO_EVIDENCE
    if _unattributed_bytes(gpu) <= MAX_UNATTRIBUTED_BYTES:
        return ""
    user = DESKTOP_USERS.get(gpu.value("display"), "a desktop")
    return f"memory in use by {user} or by processes that are not listed"


def _is_opaque(gpu: Gpu, instance: MigInstance | None = None) -> bool:
    """Whether the driver reports neither the processes nor the memory use."""
    return gpu.processes.value is None and _memory_used(gpu, instance) is None


def _memory_used(gpu: Gpu, instance: MigInstance | None) -> int | None:
    """Return the memory in use, None if it is unknown. That of an integrated GPU is mostly used by the host."""
    if instance is None and gpu.value("integrated"):
        return None
    return (gpu["memory_used"] if instance is None else instance.memory_used).value


def _may_compute(gpu: Gpu) -> bool:
    """Whether the GPU may compute more than for a desktop."""
    util: float | None = gpu.value("util")
    return util is None or util > MAX_DESKTOP_UTIL_PERCENT


def _may_have_desktop(gpu: Gpu) -> bool:
    """Whether memory in use may be that of a desktop: the driver cannot list processes, or lists those that draw.

    In a container it lists none, and a display may be active without a monitor."""
    draws = any(process.kind == "graphics" for process in gpu.processes.value or ())
    display = gpu.value("display")
    return display == "Windows" or (display == "desktop" and draws) or gpu.processes.reason == Missing.NOT_SUPPORTED


def _desktop_limit_bytes(gpu: Gpu) -> int:
    """Return the memory that a desktop may use on a GPU that counts as free."""
    # In WSL 2 the driver may not tell the utilization.
    if _may_compute(gpu) and not (gpu.value("util") is None and gpu.value("display") == "Windows"):
        return MAX_UNATTRIBUTED_BYTES
    share = int(MAX_DESKTOP_MEMORY_SHARE * (gpu.value("memory_total") or 0))
    # On a large GPU, the share alone would also cover the memory of a training run.
    return max(MAX_UNATTRIBUTED_BYTES, min(share, MAX_DESKTOP_BYTES))


def processes_on(gpu: Gpu, instance: MigInstance) -> list[GpuProcess]:
    """Return the processes on a MIG instance, and those of its GPU whose instance is unknown."""
    return [
        process
        for process in memory_holders(gpu, instance)
        if process.compute_instance in (instance.compute_instance, None)
    ]


def memory_holders(gpu: Gpu, instance: MigInstance | None) -> list[GpuProcess]:
    """Return the processes on a GPU, or in the GPU instance of a MIG instance, whose memory is in common."""
    return [
        process
        for process in gpu.processes.value or ()
        if instance is None or process.instance in (instance.gpu_instance, None)
    ]


def _unattributed_bytes(gpu: Gpu, instance: MigInstance | None = None) -> int:
    """Return the memory in use beyond that of listed processes, 0 if unknown.

    An MPS server is known by its name alone, which any process can take, so its memory is not attributed.
    """
    memory_used = _memory_used(gpu, instance)
    attributed_bytes = sum(
        process.gpu_memory.value or 0 for process in memory_holders(gpu, instance) if process.kind != "mps server"
    )
    return 0 if memory_used is None else memory_used - attributed_bytes


def _belongs_to(process: GpuProcess, runs: Sequence[ReservationInfo]) -> bool:
    """Whether a process is a rank of one of the runs, or may be one of a run that has not published its ranks yet."""
    return any(
        process.run == run.run if run.ranks else process.run is None and process.user.value == run.user for run in runs
    )
