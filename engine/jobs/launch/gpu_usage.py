"""GPU usage of a run: the poller that samples its GPUs during training, and what other users see of its ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from engine.gpus.driver import has_driver_library
from engine.gpus.monitor import DriverMonitor, first_snapshot
from engine.gpus.reservation_entry import ReservedRank
from engine.gpus.snapshot import Gpu, SamplerOptions, Snapshot
from engine.runs.events import Event, GpuEvent, SessionStarted, WaitingForGpus
from engine.runs.records import GpuSample

USAGE_INTERVAL_SECONDS = 5.0
RECORDED_READINGS = (
    "util",
    "sm_active",
    "tensor_active",
    "memory_used",
    "temperature",
    "power",
    "sm_clock",
    "max_sm_clock",
    "throttle",
)


class GpuUsagePoller:
    """Samples the GPUs with these UUIDs. It never blocks and never fails a run; without UUIDs it does nothing.

    With `processes`, `snapshot` has those of all GPUs of the host."""

    def __init__(self, uuids: Sequence[str], *, processes: bool = False) -> None:
        self._uuids = frozenset(uuids)
        self._monitor: DriverMonitor | None = None
        self._stale_at = time.monotonic() + 2 * USAGE_INTERVAL_SECONDS
        self.snapshot: Snapshot | None = None
        """The latest one."""
        if uuids and has_driver_library():
            gpus = None if processes else tuple(uuids)
            with suppress(OSError):
                self._monitor = DriverMonitor(
                    SamplerOptions(period=USAGE_INTERVAL_SECONDS, processes=processes, gpus=gpus)
                )

    def first(self) -> Snapshot | None:
        """Wait for the first snapshot in which all GPUs have answered; None if the driver does not answer."""
        if self.snapshot is None and self._monitor is not None:
            with suppress(OSError, ValueError):
                self.snapshot = first_snapshot(self._monitor)
        return self.snapshot

    def poll(self) -> GpuEvent | None:
        """Return an event if one is due, also if the driver has stopped answering."""
        if self._monitor is None:
            return None
        try:
            snapshot = self._monitor.read(0.0)
        except (OSError, ValueError):
            return None
        if snapshot is None and time.monotonic() > self._stale_at:
            snapshot = self._monitor.latest()
        if snapshot is None:
            return None
        self._stale_at = time.monotonic() + 2 * USAGE_INTERVAL_SECONDS
        self.snapshot = snapshot
        samples = [sample for gpu in snapshot.gpus for sample in _samples(gpu, snapshot.host, self._uuids)]
        return GpuEvent(gpus=samples) if samples else None

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


def _samples(gpu: Gpu, host: str, uuids: Collection[str]) -> list[GpuSample]:
    """Return the sample of a GPU, or of those of its MIG instances that have one of the UUIDs.

    A GPU in MIG mode has no sample of its own: its memory is that of all instances.
    """
    readings = {name: gpu.value(name) for name in RECORDED_READINGS}
    instances = [instance for instance in gpu.instances if instance.uuid in uuids]
    if not instances and not gpu.mig_enabled:
        return [GpuSample(gpu.uuid, host, gpu.state, **readings)] if gpu.uuid in uuids else []
    # Heat and clocks are common to all instances. NVML has no utilization of an instance, and no power draw.
    unknown = {"util": None, "power": None}
    return [
        GpuSample(
            instance.uuid,
            host,
            gpu.state,
            **readings
            | unknown
            | {name: getattr(instance, name).value for name in ("sm_active", "tensor_active", "memory_used")},
        )
        for instance in instances
    ]


def waiting_emitter(emit: Callable[[Event], None]) -> Callable[[str], None]:
    """Return a callback that emits why a run waits for GPUs, whenever the reason changes."""
    last_reason = ""

    def emit_reason(reason: str) -> None:
        nonlocal last_reason
        if reason != last_reason:
            last_reason = reason
            emit(WaitingForGpus(message=reason))

    return emit_reason


def local_gpu_ranks(started: SessionStarted) -> list[ReservedRank]:
    """Return the ranks on GPUs of this host, for the reservation that other users read."""
    host = socket.gethostname()
    ranks = [rank for rank in started.ranks if rank.host == host and rank.device != "cpu"]
    return [ReservedRank(started.name, rank.rank, rank.pid, rank.device) for rank in ranks]
