"""What the GPUs of a run do while it trains, as an event every few seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine.gpus.monitor import DriverMonitor
from engine.gpus.reservation import ReservedRank
from engine.gpus.snapshot import Gpu, SamplerOptions
from engine.runs.events import Event, GpuEvent, RunStarted, WaitingForGpus
from engine.runs.records import GpuSample

USAGE_INTERVAL_SECONDS = 5.0
RECORDED_READINGS = (
    "busy",
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
    """Looks at these GPUs, by UUID. Without any it does nothing; it never waits, and never fails a run."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._monitor: DriverMonitor | None = None
        self._stale_at = time.monotonic() + 2 * USAGE_INTERVAL_SECONDS
        if uuids:
            with suppress(OSError):
                self._monitor = DriverMonitor(
                    SamplerOptions(period=USAGE_INTERVAL_SECONDS, processes=False, gpus=list(uuids))
                )

    def poll(self) -> GpuEvent | None:
        """An event where one is due: that the driver says nothing is one too."""
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
        return GpuEvent(gpus=[_sample(gpu, snapshot.host) for gpu in snapshot.gpus]) if snapshot.gpus else None

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


def _sample(gpu: Gpu, host: str) -> GpuSample:
    return GpuSample(gpu.uuid, host, gpu.state, **{name: gpu.value(name) for name in RECORDED_READINGS})


def waiting_emitter(emit: Callable[[Event], None]) -> Callable[[str], None]:
    """Tells why a run waits, once for each reason."""
    told: list[str] = []

    def waiting(reason: str) -> None:
        if told[-1:] != [reason]:
            told.append(reason)
            emit(WaitingForGpus(message=reason))

    return waiting


def local_gpu_ranks(started: RunStarted) -> list[ReservedRank]:
    """The ranks of this host that have a GPU, as other users may know them."""
    here = socket.gethostname()
    ranks = [one for one in started.ranks if one.host == here and one.device != "cpu"]
    return [ReservedRank(started.name, one.rank, one.pid, one.device) for one in ranks]
