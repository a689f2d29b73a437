"""From `device.gpus` to GPUs that this run has to itself: chosen, reserved, and waited for where that is wanted."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.gpus.monitor import DriverMonitor, GpuMonitor, recording_path
from engine.gpus.reservation import Reservation, ReservationInfo, allocation_lock, read_reservations
from engine.gpus.selection import (
    CudaDevice,
    NotFreeError,
    Obstacle,
    Unavailable,
    cuda_devices,
    select,
    select_named,
    why_not_free,
)
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.gpus.visible_devices import visible_devices
from engine.utils.errors import UsageError

# The driver's own start can take long; a GPU that then says nothing is not waited for so long.
FIRST_SNAPSHOT_TIMEOUT_SECONDS = 30.0
FIRST_GPU_TIMEOUT_SECONDS = 5.0
WAIT_POLL_SECONDS = 1.0


@dataclass
class GpuAllocation:
    """The devices of a run, none for the CPU; `warnings` are for whoever asked. Release the reservation at the end."""

    devices: list[CudaDevice] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reservation: Reservation = field(default_factory=Reservation)


def allocate_devices(
    selection: str, run: str, *, wait: bool, on_wait: Callable[[str], None], ranks: int | None = None
) -> GpuAllocation:
    """Take the devices that `selection` means, under CUDA_VISIBLE_DEVICES, for the run of this name. With `wait` until
    they are free; `on_wait` hears each second for what. Where a launcher started `ranks` ranks on this host, auto means
    as many, used or not. Raises UsageError."""
    if selection == "cpu":
        return GpuAllocation()
    if recording_path() is not None:
        return _fall_back_to_cpu(
            selection, "GPUTRAIN_NVML plays a recording, and nothing can be trained on recorded GPUs"
        )
    if not has_driver_library():
        return _fall_back_to_cpu(selection, "no NVIDIA driver can be asked (its library is not found)", expected=True)
    monitor = DriverMonitor(SamplerOptions(period=WAIT_POLL_SECONDS, activity=False))
    try:
        snapshot = first_snapshot(monitor)
        if snapshot is None or snapshot.error is not None:
            error = "it does not answer" if snapshot is None else snapshot.error
            silent = snapshot is None or snapshot.pending
            return _fall_back_to_cpu(selection, f"no NVIDIA driver can be asked ({error})", expected=not silent)
        return _Allocator(selection, run, wait, ranks).allocate(snapshot, monitor, on_wait)
    finally:
        monitor.close()


def has_driver_library() -> bool:
    """Whether there is one. To look costs nothing, where to start a sampler would take a quarter of a second."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def first_snapshot(monitor: GpuMonitor, timeout_s: float = FIRST_SNAPSHOT_TIMEOUT_SECONDS) -> Snapshot | None:
    """What is known once the driver and its GPUs have answered, or have been given time enough to: the driver so many
    seconds."""
    began = time.monotonic()
    snapshot = monitor.read(timeout_s)
    while snapshot is not None and snapshot.pending:
        if time.monotonic() - began > (FIRST_GPU_TIMEOUT_SECONDS if snapshot.gpus else timeout_s):
            break
        snapshot = monitor.read(WAIT_POLL_SECONDS) or snapshot
    return snapshot


def _fall_back_to_cpu(selection: str, reason: str, *, expected: bool = False) -> GpuAllocation:
    if selection == "auto":
        return GpuAllocation(warnings=[] if expected else [f"{reason}; training on the CPU"])
    raise UsageError.one("device.gpus", f"{selection} cannot be had: {reason}; train on the CPU with --gpus cpu")


@dataclass
class _Allocator:
    """One run's turn to choose; the fields are those of `allocate_devices`."""

    selection: str
    run: str
    wait: bool
    ranks: int | None

    def allocate(self, snapshot: Snapshot, monitor: DriverMonitor, on_wait: Callable[[str], None]) -> GpuAllocation:
        allocation = GpuAllocation()
        shown = [device.uuid for device in visible_devices(cuda_devices(snapshot), os.environ)]
        try:
            # While it is waited the driver may go, and come back.
            while (reason := snapshot.error or self._try_allocate(allocation, snapshot, shown)) is not None:
                on_wait(reason)
                snapshot = monitor.read(WAIT_POLL_SECONDS) or monitor.latest() or snapshot
            return allocation
        except BaseException:
            allocation.reservation.release()
            raise

    def _try_allocate(self, allocation: GpuAllocation, snapshot: Snapshot, visible_uuids: Sequence[str]) -> str | None:
        """Fill the allocation in, or join the queue and return what this run waits for."""
        reservation = allocation.reservation
        with allocation_lock():
            devices = _current_devices(snapshot, visible_uuids, reservation)
            if self.wait and visible_uuids and not devices:
                return "the driver shows no GPU now"
            try:
                chosen = select(self.selection, devices, only_free=self.wait, ranks=self.ranks)
            except NotFreeError as error:
                if not self.wait:
                    raise
                reservation.enqueue(self.selection, visible_uuids, self.run)
                return error.problems[0].reason
            if chosen:
                reservation.enqueue(self.selection, visible_uuids, self.run)
                reservation.reserve([device.uuid for device in chosen])
            else:
                reservation.release()
        allocation.devices, allocation.warnings = chosen, _warnings(devices, chosen)
        return None


def _current_devices(
    snapshot: Snapshot, visible_uuids: Sequence[str], own_reservation: Reservation
) -> list[CudaDevice]:
    """The devices that this run may use, those taken that others hold, or wait for and came first."""
    held = [one for one in read_reservations(remove_stale=True) if one.key != own_reservation.key]
    by_uuid = {device.uuid: device for device in cuda_devices(snapshot, held)}
    for one in held:
        if one.is_waiting and (own_reservation.key is None or one.since < own_reservation.since):
            _mark_claimed_by_waiter(one, by_uuid)
    return [by_uuid[uuid] for uuid in visible_uuids if uuid in by_uuid]


def _mark_claimed_by_waiter(waiter: ReservationInfo, by_uuid: dict[str, CudaDevice]) -> None:
    """Mark what a run that waits will take as soon as it can."""
    free = [by_uuid[uuid] for uuid in waiter.visible if uuid in by_uuid and by_uuid[uuid].is_free]
    if match := re.fullmatch(r"free:(\d+)", waiter.selection):
        free = sorted(free, key=lambda device: (device.memory_used or 0, device.index))[: int(match[1])]
    elif waiter.selection not in ("auto", "all"):
        try:
            free = select_named(waiter.selection, free)
        except UsageError:
            free = [device for device in free if str(device.index) in waiter.selection.split(",")]
    queued = Unavailable(Obstacle.QUEUED, f"{waiter.run} of {waiter.user} waits for it and came first")
    by_uuid |= {device.uuid: replace(device, unavailable=queued) for device in free}


def _warnings(devices: Sequence[CudaDevice], chosen: Sequence[CudaDevice]) -> list[str]:
    if not chosen and devices:
        return [f"no GPU is free, training on the CPU ({why_not_free(devices)}); --wait waits for one"]
    shared = why_not_free(chosen)
    return [f"sharing what is in use: {shared}"] if shared else []
