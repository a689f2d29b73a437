"""Resolution of `device.gpus` to devices: which GPUs and MIG instances a run gets, and why others are not free.

Works on a `snapshot` and the entries of `reservation_reader`. Called by `allocation`, `engine.jobs.doctor` and the
form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.base.codec import Count
from engine.base.errors import Problem, UsageError
from engine.base.text import pluralize
from engine.base.units import format_bytes
from engine.gpus.current_use import (
    Obstacle,
    Unavailable,
    find_current_use,
    find_doubt,
    find_missing_instances,
)
from engine.gpus.free_memory import capacity_bytes, unreserved_bytes
from engine.gpus.queue_terms import WHOLE_DEVICES, QueueTerms
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.snapshot import Gpu, MigInstance, Snapshot

WAIT_ADVICE = "wait for them with --queue, share them by their indices with --gpus, or request fewer"
NCCL_MIG_MESSAGE = "NCCL cannot communicate between MIG instances, and CUDA exposes only one to a process"
MIG_ADVICE = "select one instance, or whole GPUs"
LESS_MEMORY_ADVICE = "reserve less memory with --min-free"
CPU_ADVICE = "use the CPU with --gpus cpu"


class NotFreeError(UsageError):
    """The requested GPUs exist but are not free; waiting for them may help."""


@dataclass(frozen=True)
class CudaDevice:
    """A device that CUDA can use: a GPU, or a MIG instance.

    `index` is that of the GPU in PCI bus order. `memory_used` is in bytes. A MIG instance has the UUID of its GPU as
    `parent_uuid`, and `mig_ids` as "<GPU instance ID>/<compute instance ID>". `unavailable` is None if it is free.
    `sharers` is the number of runs on a device that is free because they share it (`queue.share`, `queue.min_free`).
    `unreserved_bytes` is its memory that is neither in use nor reserved, None if NVML does not report it. `other_use`
    is who else computes on a device that is free because it has enough memory. `doubt` is why a free device may be in
    use, see `find_doubt`, else "". `capability` is the compute capability; a MIG instance has that of its GPU.
    """

    index: Count
    uuid: str
    name: str
    memory_used: Count | None
    parent_uuid: str | None = None
    mig_ids: str | None = None
    unavailable: Unavailable | None = None
    sharers: Count = 0
    unreserved_bytes: Count | None = None
    other_use: Unavailable | None = None
    doubt: str = ""
    capability: tuple[Count, Count] | None = None

    @property
    def is_free(self) -> bool:
        return self.unavailable is None

    @property
    def is_queued(self) -> bool:
        """Whether a run that is earlier in the queue claims the device."""
        return self.unavailable is not None and self.unavailable.obstacle is Obstacle.QUEUED

    @property
    def users(self) -> frozenset[str]:
        """Who may free the device; nobody if it is free or broken."""
        return frozenset() if self.unavailable is None else self.unavailable.users

    @property
    def is_too_small(self) -> bool:
        return self.unavailable is not None and self.unavailable.obstacle is Obstacle.TOO_SMALL

    def usable(self, *, wait: bool) -> bool:
        """Whether a run can use the device, even if others use it too. With `wait`, a lost or stale one may return."""
        broken = (Obstacle.TOO_SMALL, Obstacle.NO_INSTANCES, *(() if wait else (Obstacle.LOST, Obstacle.STALE)))
        return self.unavailable is None or self.unavailable.obstacle not in broken

    def __str__(self) -> str:
        return f"{self.index} ({self.name}, {self.uuid})"


# Runs with `device.wait` use the CPU of a host one after the other, so the queue treats it as one more device.
CPU = CudaDevice(0, "cpu", "CPU", None)


def cuda_devices(
    snapshot: Snapshot, reservations: Sequence[ReservationInfo] = (), terms: QueueTerms = WHOLE_DEVICES
) -> list[CudaDevice]:
    """Return the GPUs and MIG instances of a snapshot in PCI bus order.

    Lost, stale, reserved and used ones, and those with too little memory, are marked as unavailable for a run with
    these terms. A GPU without a UUID is skipped.
    """
    return [
        _device(gpu, gpu.uuid, instance, reservations, terms)
        for gpu in snapshot.gpus
        if gpu.uuid is not None
        for instance in ((gpu.mig_enabled and gpu.instances) or (None,))
    ]


def _device(
    gpu: Gpu, gpu_uuid: str, instance: MigInstance | None, reservations: Sequence[ReservationInfo], terms: QueueTerms
) -> CudaDevice:
    """Return a GPU, or one of its MIG instances."""
    uuid = gpu_uuid if instance is None else instance.uuid
    sharers, holders = shared_with(uuid, reservations, terms), holders_of(uuid, reservations)
    use, unreserved = find_current_use(gpu, instance, sharers), unreserved_bytes(gpu, instance, holders)
    unavailable = (
        _too_small(capacity_bytes(gpu, instance), terms.min_free)
        or _unresponsive(gpu)
        or find_missing_instances(gpu)
        or (None if sharers else reserved_by(uuid, reservations))
        or (_lack_of_memory(unreserved, terms.min_free, holders, use) if terms.min_free else use)
    )
    capability = gpu.value("compute_capability")
    device = CudaDevice(
        gpu.index,
        uuid,
        gpu.value("name") or "GPU of unknown name",
        gpu.value("memory_used"),
        unavailable=unavailable,
        sharers=len(sharers),
        unreserved_bytes=unreserved,
        other_use=None if unavailable else use,
        doubt="" if unavailable or use or sharers or instance is not None else find_doubt(gpu),
        capability=capability and tuple(map(int, capability.split("."))),
    )
    if instance is None:
        return device
    return replace(
        device,
        name=instance.name.value or f"MIG of {device.name}",
        memory_used=instance.memory_used.value,
        parent_uuid=gpu_uuid,
        mig_ids=f"{instance.gpu_instance}/{instance.compute_instance}",
    )


def _unresponsive(gpu: Gpu) -> Unavailable | None:
    """Return why a lost or stale GPU cannot be used, None if the GPU answers."""
    if gpu.state == "ok":
        return None
    obstacle = Obstacle.STALE if gpu.state == "stale" else Obstacle.LOST
    return Unavailable(obstacle, gpu["util"].reason or gpu.state)


def reserved_by(uuid: str, reservations: Sequence[ReservationInfo]) -> Unavailable | None:
    """Return which run has reserved a device, None if no run has."""
    holders = holders_of(uuid, reservations)
    if not holders:
        return None
    users = frozenset[str]() if any(each.is_silent for each in holders) else frozenset(each.user for each in holders)
    return Unavailable(Obstacle.RESERVED, f"reserved by run {holders[0].run} (user {holders[0].user})", users=users)


def holders_of(uuid: str, reservations: Sequence[ReservationInfo]) -> list[ReservationInfo]:
    """Return the runs that have reserved a device, or memory of it."""
    return [reservation for reservation in reservations if reservation.holds(uuid)]


def shared_with(uuid: str, reservations: Sequence[ReservationInfo], terms: QueueTerms) -> list[ReservationInfo]:
    """Return the runs that hold a device which a run with these terms may join, if there is enough memory; none if it
    may not."""
    holders = holders_of(uuid, reservations)
    # Memory of GPUs limits no runs on the CPU.
    limits = [each.share if uuid == CPU.uuid else each.max_runs for each in (terms, *holders)]
    return holders if len(holders) < min(limits) else []


def mark_reserved(
    devices: Sequence[CudaDevice], reservations: Sequence[ReservationInfo], terms: QueueTerms = WHOLE_DEVICES
) -> list[CudaDevice]:
    """Return devices without readings, marked as unavailable if they are reserved, for a run with these terms."""
    marked = []
    for device in devices:
        sharers = len(shared_with(device.uuid, reservations, terms))
        unavailable = None if sharers else reserved_by(device.uuid, reservations)
        marked.append(replace(device, unavailable=unavailable, sharers=sharers))
    return marked


def _too_small(capacity: int | None, min_free: int) -> Unavailable | None:
    """Return that a device never has `min_free` bytes of memory, None if it may have them."""
    if capacity is None or capacity >= min_free:
        return None
    return Unavailable(Obstacle.TOO_SMALL, f"{format_bytes(capacity)} of memory can be had at most")


def _lack_of_memory(
    unreserved: int | None, min_free: int, holders: Sequence[ReservationInfo], use: Unavailable | None
) -> Unavailable | None:
    """Return that less than `min_free` bytes of a device are neither in use nor reserved, None if they are enough.

    `holders` are the runs that have reserved memory of it, `use` says who else computes on it."""
    if unreserved is None:
        return Unavailable(Obstacle.UNKNOWN, "the driver does not report its free memory")
    if unreserved >= min_free:
        return None
    runs = ", ".join(f"{holder.run} {format_bytes(holder.min_free)}" for holder in holders if holder.min_free)
    reserved = f" (reserved: {runs})" if runs else ""
    users = (frozenset() if use is None else use.users).union(each.user for each in holders if not each.is_silent)
    return Unavailable(Obstacle.MEMORY, f"{format_bytes(unreserved)} of memory left{reserved}", users=users)


def select(
    selection: str,
    devices: Sequence[CudaDevice],
    *,
    only_free: bool = False,
    ranks: int | None = None,
    shares: bool = False,
) -> list[CudaDevice]:
    """Return the devices that `selection`, a value of `device.gpus`, selects. An empty list means the CPU, which is a
    device only in the queue: `allocation` passes `CPU` for a run that waits for it.

    With `only_free`, for runs that wait or reserve memory, devices selected by index or UUID must be free too, and
    stale devices count as not free instead of unusable. `ranks` is the number of ranks that an external launcher
    started on this host: "auto" then selects that many devices, free ones first. For a run that `shares` its devices,
    "auto" selects one. Raises NotFreeError if waiting may help, else UsageError.
    """
    if selection == "cpu":
        cpu = [device for device in devices if device.uuid == CPU.uuid]
        for device in cpu:
            if only_free and device.unavailable is not None:
                reason = f"the CPU is not free: {device.unavailable.message}"
                raise NotFreeError.one("device.gpus", reason, code="cpu-in-use")
        return cpu
    if selection == "auto" and ranks is not None and devices:
        usable = sorted(_usable(devices, only_free), key=lambda device: (not device.is_free, device.index))
        return _validate(sorted(usable[:ranks], key=lambda device: device.index), only_free)
    if selection == "auto":
        chosen = _select_auto(_usable(devices, only_free), devices, only_free)
        return sorted(chosen, key=preference)[:1] if shares else chosen
    if selection == "all":
        if not devices:
            raise UsageError.one("device.gpus", "all: no GPU is visible here", CPU_ADVICE, code="no-gpu")
        whole = [device for device in devices if device.mig_ids is None]
        return _validate(whole or list(devices), only_free)
    if match := re.fullmatch(r"free:(\d+)", selection):
        return _select_free(int(match[1]), devices, only_free)
    return _validate(select_named(selection, devices), only_free)


def _usable(devices: Sequence[CudaDevice], wait: bool) -> list[CudaDevice]:
    return [device for device in devices if device.usable(wait=wait)]


def _select_auto(usable: Sequence[CudaDevice], devices: Sequence[CudaDevice], only_free: bool) -> list[CudaDevice]:
    """Return all free GPUs, or one free MIG instance if no GPU is free."""
    free = [device for device in usable if device.is_free]
    chosen = [device for device in free if device.mig_ids is None] or free[:1]
    if not usable and any(device.is_too_small for device in devices):
        raise UsageError.one(
            "device.gpus", f"no GPU can be used: {why_not_free(devices)}", LESS_MEMORY_ADVICE, code="too-few-gpus"
        )
    if not chosen and usable and only_free:
        raise NotFreeError.one(
            "device.gpus", f"no GPU is free: {why_not_free(devices)}", WAIT_ADVICE, code="gpu-in-use"
        )
    return chosen


def _select_free(count: int, devices: Sequence[CudaDevice], wait: bool) -> list[CudaDevice]:
    """Return the `count` free devices that `preference` puts first."""
    if count == 0:
        raise UsageError.one("device.gpus", "free:0 requests no GPU", CPU_ADVICE, code="out-of-range")
    usable = [device for device in _usable(devices, wait) if device.mig_ids is None or count == 1]
    if count > len(usable):
        broken = why_not_free([device for device in devices if not device.usable(wait=wait)])
        because = f": {broken}" if broken else ""
        reason = f"{pluralize(count, 'free GPU')} requested, but only {len(usable)} can be used{because}"
        instances = any(device.mig_ids is not None for device in devices)
        advice = [LESS_MEMORY_ADVICE] if any(device.is_too_small for device in devices) else []
        advice += [_describe_devices(devices), *([NCCL_MIG_MESSAGE, MIG_ADVICE] if instances else [])]
        raise UsageError.one("device.gpus", reason, "; ".join(advice), code="too-few-gpus")
    free = [device for device in usable if device.is_free]
    if count > len(free):
        reason = f"{pluralize(count, 'free GPU')} requested, {len(free)} available: {why_not_free(devices)}"
        raise NotFreeError.one("device.gpus", reason, WAIT_ADVICE, code="gpu-in-use")
    free.sort(key=preference)
    return sorted(free[:count], key=lambda device: device.index)


def preference(device: CudaDevice) -> tuple[bool, int, int, int]:
    """Sort key of free devices: GPUs before MIG instances, then shared ones, then those with little memory in use."""
    return device.mig_ids is not None, -device.sharers, device.memory_used or 0, device.index


def select_named(selection: str, devices: Sequence[CudaDevice]) -> list[CudaDevice]:
    """Return the devices of a comma-separated list of indices, UUIDs and unique UUID prefixes.

    Raises UsageError if an entry matches no device or several devices, or if a device is listed twice.
    """
    chosen: list[CudaDevice] = []
    for part in (part.strip() for part in selection.split(",")):
        matches = [device for device in devices if part == str(device.index) or _is_uuid_prefix(part, device.uuid)]
        parents = {
            device.parent_uuid for device in devices if device.parent_uuid and _is_uuid_prefix(part, device.parent_uuid)
        }
        mig_instances = [device for device in devices if device.parent_uuid in parents] or [
            device for device in matches if device.mig_ids is not None and part.isdigit()
        ]
        if mig_instances:
            uuids = ", ".join(device.uuid for device in mig_instances)
            raise UsageError.one(
                "device.gpus", f"GPU {part!r} is in MIG mode", f"select one of its instances: {uuids}", code="conflict"
            )
        if not matches:
            raise UsageError.one(
                "device.gpus",
                f"there is no GPU {part!r}",
                f"{_describe_devices(devices)}; use auto, all, cpu, free:N, indices or UUIDs",
                code="gpu-not-found",
            )
        if len(matches) > 1:
            found = ", ".join(map(str, matches))
            advice = f"it may be {found}; use more characters of the UUID"
            raise UsageError.one("device.gpus", f"{part!r} matches several GPUs", advice, code="ambiguous-name")
        if matches[0] in chosen:
            raise UsageError.one(
                "device.gpus", f"GPU {matches[0]} is listed twice in {selection!r}", code="duplicate-value"
            )
        chosen += matches
    return chosen


def _is_uuid_prefix(part: str, uuid: str) -> bool:
    return len(part) > len("GPU") and uuid.startswith(part)


def _validate(chosen: list[CudaDevice], only_free: bool) -> list[CudaDevice]:
    for device in chosen:
        if device.unavailable is not None and not device.usable(wait=only_free):
            reason = f"GPU {device} cannot be used: {device.unavailable.message}"
            advice = LESS_MEMORY_ADVICE if device.is_too_small else "select other GPUs with --gpus"
            raise UsageError.one("device.gpus", reason, advice, code="gpu-failed")
    if len(chosen) > 1 and any(device.mig_ids is not None for device in chosen):
        reason = f"{len(chosen)} devices selected, including MIG instances: {NCCL_MIG_MESSAGE}"
        raise UsageError.one("device.gpus", reason, MIG_ADVICE, code="not-supported")
    if only_free and any(not device.is_free for device in chosen):
        reason = f"not all selected GPUs are free: {why_not_free(chosen)}"
        raise NotFreeError.one("device.gpus", reason, WAIT_ADVICE, code="gpu-in-use")
    return chosen


def _describe_devices(devices: Sequence[CudaDevice]) -> str:
    names = [f"{device.index} ({device.name})" for device in devices]
    return f"visible GPUs: {', '.join(names)}" if devices else "no GPU is visible here"


def why_not_free(devices: Sequence[CudaDevice]) -> str:
    """Return why devices are not free, grouped by reason: "2 GPUs (0, 1): reserved by run a (user b); GPU 2: lost"."""
    return _group_by_reason({device.index: device.unavailable.message for device in devices if device.unavailable})


def use_warnings(devices: Sequence[CudaDevice]) -> list[Problem]:
    """Return who else uses, or may use, the devices of a run: one warning per kind, grouped like `why_not_free`."""
    sharers = {device.index: f"with {pluralize(device.sharers, 'other run')}" for device in devices if device.sharers}
    others = {device.index: device.other_use.message for device in devices if device.other_use}
    doubts = {device.index: device.doubt for device in devices if device.doubt}
    kinds = (
        ("sharing GPUs that are not free", why_not_free(devices)),
        ("sharing GPUs with runs that allow it (queue.share, queue.min_free)", _group_by_reason(sharers)),
        ("sharing GPUs that have enough memory left (queue.min_free)", _group_by_reason(others)),
        ("GPUs that count as free may be in use", _group_by_reason(doubts)),
    )
    return [Problem("", f"{what}: {which}", code="gpu-in-use") for what, which in kinds if which]


def _group_by_reason(reasons: Mapping[int, str]) -> str:
    """Return the reasons of devices by their indices, each once."""
    groups: dict[str, list[str]] = {}
    for index, reason in reasons.items():
        groups.setdefault(reason, []).append(str(index))
    named = ((each, ", ".join(each), reason) for reason, each in groups.items())
    return "; ".join(
        f"GPU {indices}: {reason}" if len(each) == 1 else f"{len(each)} GPUs ({indices}): {reason}"
        for each, indices, reason in named
    )
