"""From `device.gpus` to GPUs that this run has to itself: chosen, reserved, and waited for where that is wanted."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.gpus.monitor import DriverMonitor, Monitor, recording_path
from engine.gpus.reservation import Held, Reservation, all_held, choosing
from engine.gpus.selection import (
    Device,
    NotFreeError,
    Obstacle,
    Unavailable,
    devices_of,
    named,
    select,
    why_not_free,
)
from engine.gpus.snapshot import Snapshot, Wants
from engine.gpus.visible_devices import visible
from engine.utils.errors import UsageError

# The driver's own start can take long; a GPU that then says nothing is not waited for so long.
FIRST_SECONDS = 30.0
FIRST_GPU_SECONDS = 5.0
WAIT_SECONDS = 1.0


@dataclass
class Choice:
    """The devices of a run, none for the CPU; `warnings` are for whoever asked. Release the reservation at the end."""

    devices: list[Device] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reservation: Reservation = field(default_factory=Reservation)


def choose(selection: str, run: str, *, wait: bool, waiting: Callable[[str], None], ranks: int | None = None) -> Choice:
    """Take the devices that `selection` means, under CUDA_VISIBLE_DEVICES, for the run of this name. With `wait` until
    they are free; `waiting` hears each second for what. Where a launcher started `ranks` ranks on this host, auto means
    as many, used or not. Raises UsageError."""
    if selection == "cpu":
        return Choice()
    if recording_path() is not None:
        return _none(selection, "GPUTRAIN_NVML plays a recording, and nothing can be trained on recorded GPUs")
    if not driver_library():
        return _none(selection, "no NVIDIA driver can be asked (its library is not found)", expected=True)
    monitor = DriverMonitor(Wants(period=WAIT_SECONDS, activity=False))
    try:
        snapshot = first_snapshot(monitor)
        if snapshot is None or snapshot.error is not None:
            error = "it does not answer" if snapshot is None else snapshot.error
            silent = snapshot is None or snapshot.pending
            return _none(selection, f"no NVIDIA driver can be asked ({error})", expected=not silent)
        return _Turn(selection, run, wait, ranks).take(snapshot, monitor, waiting)
    finally:
        monitor.close()


def driver_library() -> bool:
    """Whether there is one. To look costs nothing, where to start a sampler would take a quarter of a second."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def first_snapshot(monitor: Monitor, seconds: float = FIRST_SECONDS) -> Snapshot | None:
    """What is known once the driver and its GPUs have answered, or have been given time enough to: the driver so many
    seconds."""
    began = time.monotonic()
    snapshot = monitor.read(seconds)
    while snapshot is not None and snapshot.pending:
        if time.monotonic() - began > (FIRST_GPU_SECONDS if snapshot.gpus else seconds):
            break
        snapshot = monitor.read(WAIT_SECONDS) or snapshot
    return snapshot


def _none(selection: str, why: str, *, expected: bool = False) -> Choice:
    if selection == "auto":
        return Choice(warnings=[] if expected else [f"{why}; training on the CPU"])
    raise UsageError.one("device.gpus", f"{selection} cannot be had: {why}; train on the CPU with --gpus cpu")


@dataclass
class _Turn:
    """One run's turn to choose; the fields are those of `choose`."""

    selection: str
    run: str
    wait: bool
    ranks: int | None

    def take(self, snapshot: Snapshot, monitor: DriverMonitor, waiting: Callable[[str], None]) -> Choice:
        choice = Choice()
        shown = [device.uuid for device in visible(devices_of(snapshot), os.environ)]
        try:
            # While it is waited the driver may go, and come back.
            while (reason := snapshot.error or self._try_allocate(choice, snapshot, shown)) is not None:
                waiting(reason)
                snapshot = monitor.read(WAIT_SECONDS) or monitor.latest() or snapshot
            return choice
        except BaseException:
            choice.reservation.release()
            raise

    def _try_allocate(self, allocation: Choice, snapshot: Snapshot, visible_uuids: Sequence[str]) -> str | None:
        """Fill the allocation in, or join the queue and return what this run waits for."""
        reservation = allocation.reservation
        with choosing():
            devices = _as_it_stands(snapshot, visible_uuids, reservation)
            if self.wait and visible_uuids and not devices:
                return "the driver shows no GPU now"
            try:
                chosen = select(self.selection, devices, only_free=self.wait, ranks=self.ranks)
            except NotFreeError as error:
                if not self.wait:
                    raise
                reservation.enter(self.selection, visible_uuids, self.run)
                return error.problems[0].reason
            if chosen:
                reservation.enter(self.selection, visible_uuids, self.run)
                reservation.hold([device.uuid for device in chosen])
            else:
                reservation.release()
        allocation.devices, allocation.warnings = chosen, _warnings(devices, chosen)
        return None


def _as_it_stands(snapshot: Snapshot, shown: Sequence[str], mine: Reservation) -> list[Device]:
    """The devices that this run may use, those taken that others hold, or wait for and came first."""
    held = [one for one in all_held(clean=True) if one.key != mine.key]
    by_uuid = {device.uuid: device for device in devices_of(snapshot, held)}
    for one in held:
        if one.waits and (mine.key is None or one.since < mine.since):
            _put_aside(one, by_uuid)
    return [by_uuid[uuid] for uuid in shown if uuid in by_uuid]


def _put_aside(waiter: Held, by_uuid: dict[str, Device]) -> None:
    """Mark what a run that waits will take as soon as it can."""
    free = [by_uuid[uuid] for uuid in waiter.visible if uuid in by_uuid and by_uuid[uuid].free]
    if match := re.fullmatch(r"free:(\d+)", waiter.wants):
        free = sorted(free, key=lambda device: (device.memory_used or 0, device.index))[: int(match[1])]
    elif waiter.wants not in ("auto", "all"):
        try:
            free = named(waiter.wants, free)
        except UsageError:
            free = [device for device in free if str(device.index) in waiter.wants.split(",")]
    queued = Unavailable(Obstacle.QUEUED, f"{waiter.run} of {waiter.user} waits for it and came first")
    by_uuid |= {device.uuid: replace(device, unavailable=queued) for device in free}


def _warnings(devices: Sequence[Device], chosen: Sequence[Device]) -> list[str]:
    if not chosen and devices:
        return [f"no GPU is free, training on the CPU ({why_not_free(devices)}); --wait waits for one"]
    shared = why_not_free(chosen)
    return [f"sharing what is in use: {shared}"] if shared else []
