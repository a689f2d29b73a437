"""Which devices a run gets: what `device.gpus` means among those that CUDA can be given. All are known by UUID."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.gpus.reservation import Held
from engine.gpus.snapshot import Gpu, Instance, Snapshot
from engine.utils.errors import UsageError
from engine.utils.text import counted

# More than an idle driver context, less than any training: held by no process that is shown, someone else holds it.
UNEXPLAINED_BYTES = 1 << 30
WAIT_ADVICE = "--wait waits for them"
NCCL_AND_MIG = "NCCL does not join MIG instances, and CUDA shows a process only one"
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
class Device:
    """What CUDA can be given: a GPU, or a MIG instance of one, which then has a `parent` and a `place` in it (GPU and
    compute instance). `index` is the GPU's in PCI order. `unavailable` says why it is not free."""

    index: int
    uuid: str
    name: str
    memory_used: int | None
    parent: str | None = None
    place: str | None = None
    unavailable: Unavailable | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Device:
        why = values["unavailable"]
        unavailable = None if why is None else Unavailable(Obstacle(why["obstacle"]), why["message"])
        return cls(**values | {"unavailable": unavailable})

    @property
    def free(self) -> bool:
        return self.unavailable is None

    def usable(self, *, wait: bool) -> bool:
        """Whether a run can have it, be it shared; with `wait` a device that does not answer now counts too."""
        broken = (Obstacle.LOST,) if wait else (Obstacle.LOST, Obstacle.STALE)
        return self.unavailable is None or self.unavailable.obstacle not in broken

    def __str__(self) -> str:
        return f"{self.index} ({self.name}, {self.uuid})"


def devices_of(snapshot: Snapshot, held: Sequence[Held] = ()) -> list[Device]:
    """What CUDA can be given on this host, in PCI order, where these runs hold or wait for something."""
    found: list[Device] = []
    for gpu in snapshot.gpus:
        if gpu.uuid is None:
            continue
        if gpu.divided and gpu.instances:
            found += [_instance(gpu, one, held) for one in gpu.instances]
        else:
            unavailable = _silent(gpu) or _claimed(gpu.uuid, held) or use_of(gpu)
            found.append(Device(gpu.index, gpu.uuid, _name(gpu), gpu.value("memory_used"), unavailable=unavailable))
    return found


def _instance(gpu: Gpu, one: Instance, held: Sequence[Held]) -> Device:
    unavailable = _silent(gpu) or _claimed(one.uuid, held) or use_of(gpu, one)
    place = f"{one.gpu_instance}/{one.compute_instance}"
    name = one.name.value or f"MIG of {_name(gpu)}"
    return Device(gpu.index, one.uuid, name, one.memory_used.value, gpu.uuid, place, unavailable)


def _name(gpu: Gpu) -> str:
    return gpu.value("name") or "GPU of unknown name"


def _silent(gpu: Gpu) -> Unavailable | None:
    """Why nothing can run on a GPU, nor on a part of it."""
    if gpu.state == "ok":
        return None
    obstacle = Obstacle.STALE if gpu.state == "stale" else Obstacle.LOST
    return Unavailable(obstacle, gpu["busy"].reason or gpu.state)


def _claimed(uuid: str, held: Sequence[Held]) -> Unavailable | None:
    holder = next((one for one in held if uuid in one.gpus), None)
    if holder is None:
        return None
    return Unavailable(Obstacle.RESERVED, f"{holder.run} of {holder.user} has it")


def use_of(gpu: Gpu, instance: Instance | None = None) -> Unavailable | None:
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
    if used.value is not None and used.value - shown > UNEXPLAINED_BYTES:
        gibibytes = f"{used.value / 2**30:.1f} GiB"
        message = f"{gibibytes} of it are in use, by processes that the driver does not show here"
        return Unavailable(Obstacle.IN_USE, message)
    return None


def select(
    selection: str, devices: Sequence[Device], *, only_free: bool = False, ranks: int | None = None
) -> list[Device]:
    """The devices that `device.gpus` means; none means the CPU. `only_free` is for who waits: it holds also for those
    that are named, and one that does not answer may do so again. A launcher that started `ranks` ranks has counted on
    as many for auto: free ones first, then others. Raises UsageError, NotFreeError where waiting may help."""
    if selection == "cpu":
        return []
    if selection == "auto" and ranks is not None and devices:
        usable = sorted(_usable(devices, only_free), key=lambda device: (not device.free, device.index))
        return _check(sorted(usable[:ranks], key=lambda device: device.index), only_free)
    if selection == "auto":
        return _pick_all(_usable(devices, only_free), devices, only_free)
    if selection == "all":
        if not devices:
            raise UsageError.one("device.gpus", "all, but there is no GPU here", CPU_ADVICE)
        whole = [device for device in devices if device.place is None]
        return _check(whole or list(devices), only_free)
    if match := re.fullmatch(r"free:(\d+)", selection):
        return _pick(int(match[1]), devices, only_free)
    return _check(named(selection, devices), only_free)


def _usable(devices: Sequence[Device], wait: bool) -> list[Device]:
    return [device for device in devices if device.usable(wait=wait)]


def _pick_all(usable: Sequence[Device], devices: Sequence[Device], wait: bool) -> list[Device]:
    """Every whole GPU that is free, else one instance that is."""
    free = [device for device in usable if device.free]
    chosen = [device for device in free if device.place is None] or free[:1]
    if not chosen and usable and wait:
        raise NotFreeError.one("device.gpus", f"no GPU is free: {why_not_free(devices)}")
    return chosen


def _pick(wanted: int, devices: Sequence[Device], wait: bool) -> list[Device]:
    """The least used that are free, whole ones first."""
    if wanted == 0:
        raise UsageError.one("device.gpus", "free:0 asks for no GPU", CPU_ADVICE)
    fit = [device for device in _usable(devices, wait) if device.place is None or wanted == 1]
    if wanted > len(fit):
        reason = f"{counted(wanted, 'free GPU')} wanted, and no more than {len(fit)} can be had"
        instances = any(device.place is not None for device in devices)
        advice = [_there(devices), *([NCCL_AND_MIG, MIG_ADVICE] if instances else [])]
        raise UsageError.one("device.gpus", reason, "; ".join(advice))
    free = [device for device in fit if device.free]
    if wanted > len(free):
        reason = f"{counted(wanted, 'free GPU')} wanted, {len(free)} there: {why_not_free(devices)}"
        raise NotFreeError.one("device.gpus", reason, WAIT_ADVICE)
    free.sort(key=lambda device: (device.place is not None, device.memory_used or 0, device.index))
    return sorted(free[:wanted], key=lambda device: device.index)


def named(selection: str, devices: Sequence[Device]) -> list[Device]:
    """The devices of a list of indices, UUIDs and beginnings of those. Raises UsageError."""
    chosen: list[Device] = []
    for part in (part.strip() for part in selection.split(",")):
        found = [device for device in devices if part == str(device.index) or _begins(part, device.uuid)]
        parents = {device.parent for device in devices if device.parent and _begins(part, device.parent)}
        divided = [device for device in devices if device.parent in parents] or [
            device for device in found if device.place is not None and part.isdigit()
        ]
        if divided:
            there = ", ".join(device.uuid for device in divided)
            raise UsageError.one("device.gpus", f"GPU {part!r} is divided into MIG instances", f"name one: {there}")
        if not found:
            raise UsageError.one(
                "device.gpus",
                f"there is no GPU {part!r}",
                f"{_there(devices)}; give auto, all, cpu, free:N, indices or UUIDs",
            )
        if len(found) > 1:
            raise UsageError.one("device.gpus", f"{part!r} could be several GPUs", _there(devices))
        if found[0] in chosen:
            raise UsageError.one("device.gpus", f"GPU {found[0]} is named twice in {selection!r}")
        chosen += found
    return chosen


def _begins(part: str, uuid: str) -> bool:
    return len(part) > len("GPU") and uuid.startswith(part)


def _check(chosen: list[Device], only_free: bool) -> list[Device]:
    for device in chosen:
        if device.unavailable is not None and not device.usable(wait=only_free):
            raise UsageError.one("device.gpus", f"GPU {device} cannot be used: {device.unavailable.message}")
    if len(chosen) > 1 and any(device.place is not None for device in chosen):
        reason = f"{len(chosen)} devices with MIG instances among them: {NCCL_AND_MIG}"
        raise UsageError.one("device.gpus", reason, MIG_ADVICE)
    if only_free and any(not device.free for device in chosen):
        raise NotFreeError.one("device.gpus", f"not all of these are free: {why_not_free(chosen)}")
    return chosen


def _there(devices: Sequence[Device]) -> str:
    return f"there are {', '.join(map(str, devices))}" if devices else "there is no GPU here"


def why_not_free(devices: Sequence[Device]) -> str:
    """Each reason with the GPUs that it keeps from being free."""
    reasons: dict[str, list[str]] = {}
    for one in devices:
        if one.unavailable is not None:
            reasons.setdefault(one.unavailable.message, []).append(str(one.index))
    return "; ".join(f"GPU {', '.join(indices)}: {reason}" for reason, indices in reasons.items())
