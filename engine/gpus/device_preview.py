"""The devices that a run would get now.

Reserves nothing: even a short reservation would block another run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress

from engine.gpus.allocation import GpuAllocation, fall_back_to_cpu
from engine.gpus.driver import has_driver_library
from engine.gpus.monitor import DriverMonitor, first_snapshot, recording_path
from engine.gpus.queue_terms import WHOLE_DEVICES, QueueTerms
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.sampler import SamplerOptions
from engine.gpus.selection import CudaDevice, NotFreeError, cuda_devices, select
from engine.gpus.snapshot import Snapshot
from engine.gpus.visible_devices import visible_devices


def preview_devices(selection: str, terms: QueueTerms = WHOLE_DEVICES, *, wait: bool = True) -> Sequence[CudaDevice]:
    """Return the devices that a run with this `device.gpus` would get now, none on the CPU.

    Raises UsageError if this host has no such devices, and NotFreeError if the run would `wait` for them."""
    snapshot = None
    if selection != "cpu" and has_driver_library():
        with closing(DriverMonitor(SamplerOptions(activity=False))) as monitor:
            snapshot = first_snapshot(monitor)
    return preview_allocation(selection, snapshot, wait=wait, terms=terms).devices


def check_devices_exist(selection: str, terms: QueueTerms = WHOLE_DEVICES) -> None:
    """Raise UsageError if this host has no such devices, whatever is freed. One that is lost counts."""
    with suppress(NotFreeError):
        preview_devices(selection, terms)


def preview_allocation(
    selection: str, snapshot: Snapshot | None, *, wait: bool, terms: QueueTerms = WHOLE_DEVICES
) -> GpuAllocation:
    """Choose the devices that `allocate_devices` would choose at the time of a snapshot, and reserve nothing.

    Without a `snapshot` the driver does not answer. Raises UsageError as `allocate_devices` does, and NotFreeError if
    the run would `wait` for devices."""
    if selection == "cpu" or recording_path() is not None:
        return fall_back_to_cpu(selection, snapshot)
    allocation, reservations = GpuAllocation(), read_reservations()
    if snapshot is None or snapshot.error is not None:
        return fall_back_to_cpu(selection, snapshot, wait=wait)
    devices = visible_devices(cuda_devices(snapshot, reservations, terms), os.environ)
    only_free = wait or bool(terms.min_free)
    chosen = select(selection, devices, only_free=only_free, shares=terms.shares)
    allocation.choose(chosen, devices, snapshot, selection)
    return allocation
