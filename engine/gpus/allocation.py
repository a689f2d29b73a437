"""Allocation of GPUs to a run: resolves `device.gpus`, waits in the queue if requested, and reserves the devices.

Called by `engine.launch` and `engine.bench`. Uses `monitor`, `visible_devices`, `selection` and `reservation`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

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
from engine.gpus.unmonitored import has_library, mark_reserved, unmonitored_gpus
from engine.gpus.visible_devices import visible_devices
from engine.utils.errors import UsageError

FIRST_SNAPSHOT_TIMEOUT_SECONDS = 30.0  # without persistence mode, the driver initializes the GPUs first
ALL_GPUS_TIMEOUT_SECONDS = 5.0  # for every GPU to answer, if at least one has
WAIT_POLL_SECONDS = 1.0
UNMONITORED_WARNING = "NVML reports no GPU, but torch does: their readings and other users' processes are unknown"

# The devices of this host, marked as unavailable if one of the reservations holds them.
DeviceLister = Callable[[Sequence[ReservationInfo]], list[CudaDevice]]


@dataclass
class GpuAllocation:
    """The devices of a run, none for the CPU, and warnings for the user.

    The caller releases the `reservation` when the run ends.
    """

    devices: list[CudaDevice] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reservation: Reservation = field(default_factory=Reservation)


def allocate_devices(
    selection: str, run: str, *, wait: bool, on_wait: Callable[[str], None], ranks: int | None = None
) -> GpuAllocation:
    """Reserve the devices that `selection`, a value of `device.gpus`, selects within CUDA_VISIBLE_DEVICES.

    `run` is the run name that other users see. With `wait`, block until the devices are free; `on_wait` receives the
    reason once per second. `ranks` is the number of ranks that an external launcher started on this host: "auto" then
    reserves that many devices, if necessary shared. Raises UsageError if the selection is invalid or not available.
    """
    allocator = _Allocator(selection, run, wait, ranks)
    if selection == "cpu" or recording_path() is not None:
        return _fall_back_to_cpu(selection, None)
    if not has_driver_library():
        gpus = _unmonitored(None)
        return allocator.allocate_unmonitored(gpus, on_wait) if gpus else _fall_back_to_cpu(selection, None)
    monitor = DriverMonitor(SamplerOptions(period=WAIT_POLL_SECONDS, activity=False))
    try:
        snapshot = first_snapshot(monitor)
        if gpus := _unmonitored(snapshot):
            return allocator.allocate_unmonitored(gpus, on_wait)
        if snapshot is None or snapshot.error is not None:
            return _fall_back_to_cpu(selection, snapshot)
        return allocator.allocate(snapshot, monitor, on_wait)
    finally:
        monitor.close()


def preview_allocation(selection: str, snapshot: Snapshot | None, *, wait: bool) -> GpuAllocation:
    """Choose the devices that `allocate_devices` would choose at the time of a snapshot, and reserve nothing.

    Without a `snapshot` the driver does not answer. Raises UsageError as `allocate_devices` does, and NotFreeError if
    the run would `wait` for devices."""
    if selection == "cpu" or recording_path() is not None:
        return _fall_back_to_cpu(selection, snapshot)
    if unmonitored := _unmonitored(snapshot):
        devices, warnings = mark_reserved(unmonitored, read_reservations()), [UNMONITORED_WARNING]
    elif snapshot is None or snapshot.error is not None:
        return _fall_back_to_cpu(selection, snapshot)
    else:
        devices, warnings = visible_devices(cuda_devices(snapshot, read_reservations()), os.environ), []
    chosen = select(selection, devices, only_free=wait)
    return GpuAllocation(chosen, _warnings(devices, chosen) + (warnings if chosen else []))


def _unmonitored(snapshot: Snapshot | None) -> list[CudaDevice]:
    """Return the GPUs that torch sees although NVML sees none."""
    if snapshot is None:
        # A driver that does not answer NVML would not answer torch either.
        return [] if has_driver_library() else unmonitored_gpus(os.environ)
    return [] if snapshot.gpus or snapshot.pending else unmonitored_gpus(os.environ)


def has_driver_library() -> bool:
    """Whether the NVML library is installed. Starting a sampler only to find out would take 0.25 s."""
    return has_library("libnvidia-ml.so.1")


def first_snapshot(monitor: GpuMonitor, timeout_s: float = FIRST_SNAPSHOT_TIMEOUT_SECONDS) -> Snapshot | None:
    """Return the first snapshot in which all GPUs have answered, or the latest one after a timeout.

    `timeout_s` is the timeout for the driver. Return None if there was no snapshot at all.
    """
    began = time.monotonic()
    snapshot = monitor.read(timeout_s)
    while snapshot is not None and snapshot.pending:
        if time.monotonic() - began > (ALL_GPUS_TIMEOUT_SECONDS if snapshot.gpus else timeout_s):
            break
        snapshot = monitor.read(WAIT_POLL_SECONDS) or snapshot
    return snapshot


def _fall_back_to_cpu(selection: str, snapshot: Snapshot | None) -> GpuAllocation:
    """Train on the CPU if `selection` allows it, because no GPU can be chosen from the snapshot. Raises UsageError."""
    if selection == "cpu":
        return GpuAllocation()
    reason, expected = "the NVIDIA driver is not available (libnvidia-ml.so.1 not found)", True
    if recording_path() is not None:
        reason = "GPUTRAIN_NVML replays recorded GPUs, which cannot train (unset it to use the GPUs of this host)"
        expected = False
    elif has_driver_library():
        error = "no answer" if snapshot is None else snapshot.error
        reason = f"the NVIDIA driver is not available ({error})"
        expected = snapshot is not None and not snapshot.pending
    if selection == "auto":
        return GpuAllocation(warnings=[] if expected else [f"{reason}; training uses the CPU"])
    raise UsageError.one("device.gpus", f"{selection} cannot be used: {reason}; train on the CPU with --gpus cpu")


@dataclass
class _Allocator:
    """Parameters of `allocate_devices`, and the loop that retries until the devices are reserved."""

    selection: str
    run: str
    wait: bool
    ranks: int | None

    def allocate(self, snapshot: Snapshot, monitor: DriverMonitor, on_wait: Callable[[str], None]) -> GpuAllocation:
        allocation = GpuAllocation()
        visible_ids = [device.reservation_id for device in visible_devices(cuda_devices(snapshot), os.environ)]
        try:
            # The driver may become unavailable and return while the run waits.
            while (
                reason := snapshot.error or self._try_allocate(allocation, partial(cuda_devices, snapshot), visible_ids)
            ) is not None:
                on_wait(reason)
                snapshot = monitor.read(WAIT_POLL_SECONDS) or monitor.latest() or snapshot
            return allocation
        except BaseException:
            allocation.reservation.release()
            raise

    def allocate_unmonitored(self, gpus: Sequence[CudaDevice], on_wait: Callable[[str], None]) -> GpuAllocation:
        """Allocate from the GPUs that only torch sees."""
        allocation, visible_ids = GpuAllocation(), [gpu.reservation_id for gpu in gpus]
        try:
            while (reason := self._try_allocate(allocation, partial(mark_reserved, gpus), visible_ids)) is not None:
                on_wait(reason)
                time.sleep(WAIT_POLL_SECONDS)
            allocation.warnings += [UNMONITORED_WARNING] if allocation.devices else []
            return allocation
        except BaseException:
            allocation.reservation.release()
            raise

    def _try_allocate(
        self, allocation: GpuAllocation, list_devices: DeviceLister, visible_ids: Sequence[str]
    ) -> str | None:
        """Fill `allocation` and return None, or join the queue and return the reason for waiting."""
        reservation = allocation.reservation
        with allocation_lock():
            devices = _current_devices(list_devices, visible_ids, reservation)
            if self.wait and visible_ids and not devices:
                return "the driver currently reports no GPU"
            try:
                chosen = select(self.selection, devices, only_free=self.wait, ranks=self.ranks)
            except NotFreeError as error:
                if not self.wait:
                    raise
                reservation.enqueue(self.selection, visible_ids, self.run)
                return error.problems[0].reason
            if chosen:
                reservation.enqueue(self.selection, visible_ids, self.run)
                reservation.reserve([device.reservation_id for device in chosen])
            else:
                reservation.release()
        allocation.devices, allocation.warnings = chosen, _warnings(devices, chosen)
        return None


def _current_devices(
    list_devices: DeviceLister, visible_ids: Sequence[str], own_reservation: Reservation
) -> list[CudaDevice]:
    """Return the visible devices. Those reserved by other runs, or claimed by runs ahead in the queue, are not free."""
    reservations = [
        reservation for reservation in read_reservations(remove_stale=True) if reservation.key != own_reservation.key
    ]
    by_id = {device.reservation_id: device for device in list_devices(reservations)}
    for reservation in reservations:
        if reservation.is_waiting and (own_reservation.key is None or reservation.since < own_reservation.since):
            _mark_claimed_by_waiter(reservation, by_id)
    return [by_id[name] for name in visible_ids if name in by_id]


def _mark_claimed_by_waiter(waiter: ReservationInfo, by_id: dict[str, CudaDevice]) -> None:
    """Mark the free devices that a run earlier in the queue would use as not free for this run."""
    free = [by_id[name] for name in waiter.visible if name in by_id and by_id[name].is_free]
    if match := re.fullmatch(r"free:(\d+)", waiter.selection):
        free = sorted(free, key=lambda device: (device.memory_used or 0, device.index))[: int(match[1])]
    elif waiter.selection not in ("auto", "all"):
        try:
            free = select_named(waiter.selection, free)
        except UsageError:
            free = [device for device in free if str(device.index) in waiter.selection.split(",")]
    queued = Unavailable(Obstacle.QUEUED, f"run {waiter.run} (user {waiter.user}) is ahead in the queue")
    by_id |= {device.reservation_id: replace(device, unavailable=queued) for device in free}


def _warnings(devices: Sequence[CudaDevice], chosen: Sequence[CudaDevice]) -> list[str]:
    if not chosen and devices:
        return [f"no GPU is free ({why_not_free(devices)}); training uses the CPU; wait for a GPU with --wait"]
    shared = why_not_free(chosen)
    return [f"sharing GPUs that are not free: {shared}"] if shared else []
