"""The devices that a run would get now. Nothing is reserved: for a moment, another run would find them in use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from engine.gpus.allocation import preview_allocation
from engine.gpus.monitor import DriverMonitor, first_snapshot
from engine.gpus.queue_terms import WHOLE_DEVICES, QueueTerms
from engine.gpus.sampler import SamplerOptions
from engine.gpus.selection import CudaDevice
from engine.gpus.unmonitored import has_driver_library


def preview_devices(selection: str, terms: QueueTerms = WHOLE_DEVICES) -> Sequence[CudaDevice]:
    """Return the devices that a run with this `device.gpus` would get now, none on the CPU.

    Raises UsageError if this host has no such devices, and NotFreeError if the run would wait for them."""
    snapshot = None
    if selection != "cpu" and has_driver_library():
        with closing(DriverMonitor(SamplerOptions(activity=False))) as monitor:
            snapshot = first_snapshot(monitor)
    return preview_allocation(selection, snapshot, wait=True, terms=terms).devices
