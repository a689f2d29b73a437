"""Which devices a run gets: what `device.gpus` means among those that CUDA can be given. All are known by UUID."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.gpus.reservation import Held
from engine.gpus.snapshot import Gpu, Instance, Snapshot
from engine.utils.errors import UsageError
from engine.utils.text import counted

# More than an idle driver context, less than any training: held by no process that is shown, someone else holds it.
UNEXPLAINED_BYTES = 1 << 30
WAIT_HINT = "; --wait waits for them"
NCCL_AND_MIG = "NCCL does not join MIG instances, and CUDA shows a process only one; name one instance, or whole GPUs"


class NotFreeError(UsageError):
    """What is wanted exists and is taken: waiting may help."""


@dataclass(frozen=True)
class Device:
    """What CUDA can be given: a GPU, or a MIG instance of one, which then has a `parent` and a `place` in it (GPU and
    compute instance). `index` is the GPU's in PCI order. `taken` says why it is not free, `broken` why it cannot be
    used at all."""

    index: int
    uuid: str
    name: str
    memory_used: int | None
    parent: str | None = None
    place: str | None = None
    taken: str | None = None
    broken: str | None = None

    @property
    def free(self) -> bool:
        return self.taken is None and self.broken is None

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
            taken = _claimed(gpu.uuid, held) or use_of(gpu)
            broken = None if gpu.state == "ok" else str(gpu["busy"].reason)
            found.append(Device(gpu.index, gpu.uuid, _name(gpu), gpu.value("memory_used"), None, None, taken, broken))
    return found


def _instance(gpu: Gpu, one: Instance, held: Sequence[Held]) -> Device:
    taken = _claimed(one.uuid, held) or use_of(gpu, one)
    place = f"{one.gpu_instance}/{one.compute_instance}"
    broken = None if gpu.state == "ok" else str(one.memory_used.reason)
    name = one.name.value or f"MIG of {_name(gpu)}"
    return Device(gpu.index, one.uuid, name, one.memory_used.value, gpu.uuid, place, taken, broken)


def _name(gpu: Gpu) -> str:
    return gpu.value("name") or "GPU of unknown name"


def _claimed(uuid: str, held: Sequence[Held]) -> str | None:
    holder = next((one for one in held if uuid in one.gpus), None)
    return None if holder is None else f"{holder.run} of {holder.user} has it"


def use_of(gpu: Gpu, instance: Instance | None = None) -> str | None:
    """Who computes on a GPU or a part of it, as far as the driver tells; None where nobody does. What is not known is
    not taken for nothing."""
    if gpu.processes.value is None and gpu["memory_used"].value is None:
        return f"it is not known who uses it ({gpu.processes.reason})"
    part = None if instance is None else instance.gpu_instance
    here = [one for one in gpu.processes.value or () if instance is None or one.instance in (part, None)]
    computing = [one for one in here if one.kind == "compute"]
    if computing:
        first = computing[0]
        return f"{first.run or 'process ' + str(first.pid)} of {first.user.value or 'an unknown user'} computes on it"
    used = gpu["memory_used"] if instance is None else instance.memory_used
    shown = sum(one.gpu_memory.value or 0 for one in here)
    if used.value is not None and used.value - shown > UNEXPLAINED_BYTES:
        return f"{used.value / 2**30:.1f} GiB of it are in use, by processes that the driver does not show here"
    return None


def select(
    selection: str, devices: Sequence[Device], *, only_free: bool = False, ranks: int | None = None
) -> list[Device]:
    """The devices that `device.gpus` means; none means the CPU. `only_free` holds also for those that are named. A
    launcher that started `ranks` ranks has counted on as many for auto: free ones first, then others. Raises
    UsageError, NotFreeError where waiting may help."""
    if selection == "cpu":
        return []
    if selection == "auto" and ranks is not None and devices:
        usable = sorted(_usable(devices), key=lambda device: (not device.free, device.index))
        return _check(sorted(usable[:ranks], key=lambda device: device.index), only_free)
    if selection == "auto":
        return _pick_all(_usable(devices), devices, only_free)
    if selection == "all":
        if not devices:
            raise UsageError.one("device.gpus", "all, but there is no GPU here; train on the CPU with --gpus cpu")
        whole = [device for device in devices if device.place is None]
        return _check(whole or list(devices), only_free)
    if match := re.fullmatch(r"free:(\d+)", selection):
        return _pick(int(match[1]), devices)
    return _check(named(selection, devices), only_free)


def _usable(devices: Sequence[Device]) -> list[Device]:
    return [device for device in devices if device.broken is None]


def _pick_all(usable: Sequence[Device], devices: Sequence[Device], wait: bool) -> list[Device]:
    """Every whole GPU that is free, else one instance that is."""
    free = [device for device in usable if device.free]
    chosen = [device for device in free if device.place is None] or free[:1]
    if not chosen and usable and wait:
        raise NotFreeError.one("device.gpus", f"no GPU is free: {why_not_free(devices)}")
    return chosen


def _pick(wanted: int, devices: Sequence[Device]) -> list[Device]:
    """The least used that are free, whole ones first."""
    if wanted == 0:
        raise UsageError.one("device.gpus", "free:0 asks for no GPU; train on the CPU with --gpus cpu")
    fit = [device for device in _usable(devices) if device.place is None or wanted == 1]
    if wanted > len(fit):
        instances = any(device.place is not None for device in devices)
        raise UsageError.one(
            "device.gpus",
            f"{counted(wanted, 'free GPU')} wanted, and no more than {len(fit)} can be had; {_there(devices)}"
            + (f"; {NCCL_AND_MIG}" if instances else ""),
        )
    free = [device for device in fit if device.free]
    if wanted > len(free):
        raise NotFreeError.one(
            "device.gpus",
            f"{counted(wanted, 'free GPU')} wanted, {len(free)} there: {why_not_free(devices)}{WAIT_HINT}",
        )
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
            raise UsageError.one("device.gpus", f"GPU {part!r} is divided into MIG instances; name one: {there}")
        if not found:
            raise UsageError.one(
                "device.gpus",
                f"there is no GPU {part!r}; {_there(devices)}; give auto, all, cpu, free:N, indices or UUIDs",
            )
        if len(found) > 1:
            raise UsageError.one("device.gpus", f"{part!r} could be several GPUs; {_there(devices)}")
        if found[0] in chosen:
            raise UsageError.one("device.gpus", f"GPU {found[0]} is named twice in {selection!r}")
        chosen += found
    return chosen


def _begins(part: str, uuid: str) -> bool:
    return len(part) > len("GPU") and uuid.startswith(part)


def _check(chosen: list[Device], only_free: bool) -> list[Device]:
    for device in chosen:
        if device.broken is not None:
            raise UsageError.one("device.gpus", f"GPU {device} cannot be used: {device.broken}")
    if len(chosen) > 1 and any(device.place is not None for device in chosen):
        raise UsageError.one("device.gpus", f"{len(chosen)} devices with MIG instances among them: {NCCL_AND_MIG}")
    if only_free and any(not device.free for device in chosen):
        raise NotFreeError.one("device.gpus", f"not all of these are free: {why_not_free(chosen)}")
    return chosen


def _there(devices: Sequence[Device]) -> str:
    return f"there are {', '.join(map(str, devices))}" if devices else "there is no GPU here"


def why_not_free(devices: Sequence[Device]) -> str:
    """Each reason with the GPUs that it keeps from being free."""
    reasons: dict[str, list[str]] = {}
    for one in devices:
        if reason := one.broken or one.taken:
            reasons.setdefault(reason, []).append(str(one.index))
    return "; ".join(f"GPU {', '.join(indices)}: {reason}" for reason, indices in reasons.items())
