"""Which devices a run gets: what `device.gpus` means among those that CUDA can be given. All are known by UUID."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.gpus.reservation import ReservationInfo
from engine.gpus.snapshot import Gpu, MigInstance, Snapshot
from engine.utils.errors import UsageError
from engine.utils.text import pluralize

# More than an idle driver context, less than any training: held by no process that is shown, someone else holds it.
MAX_UNATTRIBUTED_BYTES = 1 << 30
WAIT_ADVICE = "--wait waits for them"
NCCL_MIG_MESSAGE = "NCCL does not join MIG instances, and CUDA shows a process only one"
MIG_ADVICE = "name one instance, or whole GPUs"
CPU_ADVICE = "train on the CPU with --gpus cpu"


class NotFreeError(UsageError):
    """What is wanted exists and is taken: waiting may help."""


class Obstacle(StrEnum):
    """What keeps a device from being free."""

    IN_USE = "in use"
    RESERVED = "reserved"
    QUEUED = "queued"
    """A run that came first waits for it."""
    UNKNOWN = "unknown"
    """The driver does not tell who uses it."""
    STALE = "stale"
    """It does not answer now."""
    LOST = "lost"


@dataclass(frozen=True)
class Unavailable:
    """Why a device is not free; the `message` names who has it."""

    obstacle: Obstacle
    message: str


@dataclass(frozen=True)
class CudaDevice:
    """What CUDA can be given: a GPU, or a MIG instance of one, which then has a `parent_uuid` and a `mig_ids` in it
    (GPU and compute instance). `index` is the GPU's in PCI order. `unavailable` says why it is not free."""

    index: int
    uuid: str
    name: str
    memory_used: int | None
    parent_uuid: str | None = None
    mig_ids: str | None = None
    unavailable: Unavailable | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CudaDevice:
        why = values["unavailable"]
        unavailable = None if why is None else Unavailable(Obstacle(why["obstacle"]), why["message"])
        return cls(**values | {"unavailable": unavailable})

    @property
    def is_free(self) -> bool:
        return self.unavailable is None

    def usable(self, *, wait: bool) -> bool:
        """Whether a run can have it, be it shared; with `wait` a device that does not answer now counts too."""
        broken = (Obstacle.LOST,) if wait else (Obstacle.LOST, Obstacle.STALE)
        return self.unavailable is None or self.unavailable.obstacle not in broken

    def __str__(self) -> str:
        return f"{self.index} ({self.name}, {self.uuid})"


def cuda_devices(snapshot: Snapshot, reservations: Sequence[ReservationInfo] = ()) -> list[CudaDevice]:
    """What CUDA can be given on this host, in PCI order, where these runs hold or wait for something."""
    found: list[CudaDevice] = []
    for gpu in snapshot.gpus:
        if gpu.uuid is None:
            continue
        if gpu.mig_enabled and gpu.instances:
            found += [_mig_device(gpu, one, reservations) for one in gpu.instances]
        else:
            unavailable = _silent(gpu) or _reserved_by(gpu.uuid, reservations) or find_current_use(gpu)
            found.append(
                CudaDevice(gpu.index, gpu.uuid, _gpu_name(gpu), gpu.value("memory_used"), unavailable=unavailable)
            )
    return found


def _mig_device(gpu: Gpu, instance: MigInstance, reservations: Sequence[ReservationInfo]) -> CudaDevice:
    unavailable = _silent(gpu) or _reserved_by(instance.uuid, reservations) or find_current_use(gpu, instance)
    place = f"{instance.gpu_instance}/{instance.compute_instance}"
    name = instance.name.value or f"MIG of {_gpu_name(gpu)}"
    return CudaDevice(
        index=gpu.index,
        uuid=instance.uuid,
        name=name,
        memory_used=instance.memory_used.value,
        parent_uuid=gpu.uuid,
        mig_ids=place,
        unavailable=unavailable,
    )


def _gpu_name(gpu: Gpu) -> str:
    return gpu.value("name") or "GPU of unknown name"


def _silent(gpu: Gpu) -> Unavailable | None:
    """Why nothing can run on a GPU, nor on a part of it."""
    if gpu.state == "ok":
        return None
    obstacle = Obstacle.STALE if gpu.state == "stale" else Obstacle.LOST
    return Unavailable(obstacle, gpu["busy"].reason or gpu.state)


def _reserved_by(uuid: str, reservations: Sequence[ReservationInfo]) -> Unavailable | None:
    holder = next((one for one in reservations if uuid in one.gpus), None)
    if holder is None:
        return None
    return Unavailable(Obstacle.RESERVED, f"{holder.run} of {holder.user} has it")


def find_current_use(gpu: Gpu, instance: MigInstance | None = None) -> Unavailable | None:
    """Who computes on a GPU or a part of it, as far as the driver tells; None where nobody does. What is not known is
    not taken for nothing."""
    if gpu.processes.value is None and gpu["memory_used"].value is None:
        return Unavailable(Obstacle.UNKNOWN, f"it is not known who uses it ({gpu.processes.reason})")
    part = None if instance is None else instance.gpu_instance
    here = [one for one in gpu.processes.value or () if instance is None or one.instance in (part, None)]
    computing = [one for one in here if one.kind == "compute"]
    if computing:
        first = computing[0]
        who = f"{first.run or 'process ' + str(first.pid)} of {first.user.value or 'an unknown user'}"
        return Unavailable(Obstacle.IN_USE, f"{who} computes on it")
    used = gpu["memory_used"] if instance is None else instance.memory_used
    shown = sum(one.gpu_memory.value or 0 for one in here)
    if used.value is not None and used.value - shown > MAX_UNATTRIBUTED_BYTES:
        gibibytes = f"{used.value / 2**30:.1f} GiB"
        message = f"{gibibytes} of it are in use, by processes that the driver does not show here"
        return Unavailable(Obstacle.IN_USE, message)
    return None


def select(
    selection: str, devices: Sequence[CudaDevice], *, only_free: bool = False, ranks: int | None = None
) -> list[CudaDevice]:
    """The devices that `device.gpus` means; none means the CPU. `only_free` is for who waits: it holds also for those
    that are named, and one that does not answer may do so again. A launcher that started `ranks` ranks has counted on
    as many for auto: free ones first, then others. Raises UsageError, NotFreeError where waiting may help."""
    if selection == "cpu":
        return []
    if selection == "auto" and ranks is not None and devices:
        usable = sorted(_usable(devices, only_free), key=lambda device: (not device.is_free, device.index))
        return _validate(sorted(usable[:ranks], key=lambda device: device.index), only_free)
    if selection == "auto":
        return _select_auto(_usable(devices, only_free), devices, only_free)
    if selection == "all":
        if not devices:
            raise UsageError.one("device.gpus", "all, but there is no GPU here", CPU_ADVICE)
        whole = [device for device in devices if device.mig_ids is None]
        return _validate(whole or list(devices), only_free)
    if match := re.fullmatch(r"free:(\d+)", selection):
        return _select_free(int(match[1]), devices, only_free)
    return _validate(select_named(selection, devices), only_free)


def _usable(devices: Sequence[CudaDevice], wait: bool) -> list[CudaDevice]:
    return [device for device in devices if device.usable(wait=wait)]


def _select_auto(usable: Sequence[CudaDevice], devices: Sequence[CudaDevice], only_free: bool) -> list[CudaDevice]:
    """Every whole GPU that is free, else one instance that is."""
    free = [device for device in usable if device.is_free]
    chosen = [device for device in free if device.mig_ids is None] or free[:1]
    if not chosen and usable and only_free:
        raise NotFreeError.one("device.gpus", f"no GPU is free: {why_not_free(devices)}")
    return chosen


def _select_free(count: int, devices: Sequence[CudaDevice], wait: bool) -> list[CudaDevice]:
    """The least used that are free, whole ones first."""
    if count == 0:
        raise UsageError.one("device.gpus", "free:0 asks for no GPU", CPU_ADVICE)
    fit = [device for device in _usable(devices, wait) if device.mig_ids is None or count == 1]
    if count > len(fit):
        reason = f"{pluralize(count, 'free GPU')} wanted, and no more than {len(fit)} can be had"
        instances = any(device.mig_ids is not None for device in devices)
        advice = [_describe_devices(devices), *([NCCL_MIG_MESSAGE, MIG_ADVICE] if instances else [])]
        raise UsageError.one("device.gpus", reason, "; ".join(advice))
    free = [device for device in fit if device.is_free]
    if count > len(free):
        reason = f"{pluralize(count, 'free GPU')} wanted, {len(free)} there: {why_not_free(devices)}"
        raise NotFreeError.one("device.gpus", reason, WAIT_ADVICE)
    free.sort(key=lambda device: (device.mig_ids is not None, device.memory_used or 0, device.index))
    return sorted(free[:count], key=lambda device: device.index)


def select_named(selection: str, devices: Sequence[CudaDevice]) -> list[CudaDevice]:
    """The devices of a list of indices, UUIDs and beginnings of those. Raises UsageError."""
    chosen: list[CudaDevice] = []
    for part in (part.strip() for part in selection.split(",")):
        found = [device for device in devices if part == str(device.index) or _is_uuid_prefix(part, device.uuid)]
        parents = {
            device.parent_uuid for device in devices if device.parent_uuid and _is_uuid_prefix(part, device.parent_uuid)
        }
        divided = [device for device in devices if device.parent_uuid in parents] or [
            device for device in found if device.mig_ids is not None and part.isdigit()
        ]
        if divided:
            there = ", ".join(device.uuid for device in divided)
            raise UsageError.one("device.gpus", f"GPU {part!r} is divided into MIG instances", f"name one: {there}")
        if not found:
            raise UsageError.one(
                "device.gpus",
                f"there is no GPU {part!r}",
                f"{_describe_devices(devices)}; give auto, all, cpu, free:N, indices or UUIDs",
            )
        if len(found) > 1:
            raise UsageError.one("device.gpus", f"{part!r} could be several GPUs", _describe_devices(devices))
        if found[0] in chosen:
            raise UsageError.one("device.gpus", f"GPU {found[0]} is named twice in {selection!r}")
        chosen += found
    return chosen


def _is_uuid_prefix(part: str, uuid: str) -> bool:
    return len(part) > len("GPU") and uuid.startswith(part)


def _validate(chosen: list[CudaDevice], only_free: bool) -> list[CudaDevice]:
    for device in chosen:
        if device.unavailable is not None and not device.usable(wait=only_free):
            raise UsageError.one("device.gpus", f"GPU {device} cannot be used: {device.unavailable.message}")
    if len(chosen) > 1 and any(device.mig_ids is not None for device in chosen):
        reason = f"{len(chosen)} devices with MIG instances among them: {NCCL_MIG_MESSAGE}"
        raise UsageError.one("device.gpus", reason, MIG_ADVICE)
    if only_free and any(not device.is_free for device in chosen):
        raise NotFreeError.one("device.gpus", f"not all of these are free: {why_not_free(chosen)}")
    return chosen


def _describe_devices(devices: Sequence[CudaDevice]) -> str:
    return f"there are {', '.join(map(str, devices))}" if devices else "there is no GPU here"


def why_not_free(devices: Sequence[CudaDevice]) -> str:
    """Each reason with the GPUs that it keeps from being free."""
    reasons: dict[str, list[str]] = {}
    for one in devices:
        if one.unavailable is not None:
            reasons.setdefault(one.unavailable.message, []).append(str(one.index))
    return "; ".join(f"GPU {', '.join(indices)}: {reason}" for reason, indices in reasons.items())
