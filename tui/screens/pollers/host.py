"""Pollers of this host: its GPUs, and the load of its CPU, memory and disk."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import Problem, UsageError
from engine.base.host import free_bytes
from engine.gpus.monitor import GpuMonitor, open_monitor
from engine.gpus.snapshot import SamplerOptions, Snapshot
from tui.charts.history import GpuLoads
from tui.screens.pollers.watched import POLL_INTERVAL_SECONDS, Poller, Watched

# Later, CPU utilization is the mean since the previous poll.
FIRST_CPU_SECONDS = 0.2


@dataclass(frozen=True)
class HostLoad:
    """CPU utilization in percent, memory and the free disk space of the runs in bytes, None if it is unknown."""

    cpu_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    disk_free_bytes: int | None = None


class GpuPoller(Poller):
    """Publishes the latest snapshot of the GPUs of this host and their past load, or the problem that prevents it.

    No `Watched`: the read blocks until the sampler has the next snapshot, so there is no interval.
    """

    def __init__(self, interval_s: float = POLL_INTERVAL_SECONDS, monitor: GpuMonitor | None = None) -> None:
        super().__init__("gpus", 0.0)
        self._options = SamplerOptions(period=interval_s)
        self._period_s = interval_s
        self._monitor = monitor
        self.snapshot: Snapshot | None = None
        self.loads = GpuLoads()

    def poll(self) -> None:
        try:
            if self._monitor is None:
                self._monitor = open_monitor(self._options)
            period_s = max(self._options.period, self.min_interval_s)
            if period_s != self._period_s:
                self._period_s = period_s
                self._monitor.set_period(period_s)
            snapshot = self._monitor.read(min(self._options.period, 1.0))
        except (UsageError, OSError, ValueError) as error:
            self.problem = (
                error.problems[0] if isinstance(error, UsageError) else Problem("", str(error), code="not-readable")
            )
            self._stop_event.wait(5.0)
            return
        self.problem = None
        if snapshot is not None:
            self.loads.record(snapshot)
        latest = self._monitor.latest() if snapshot is None else snapshot
        self.snapshot = latest

    def has_result(self) -> bool:
        return self.snapshot is not None

    def cleanup(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


class HostPoller(Watched[HostLoad]):
    """Publishes the latest load of the host."""

    def __init__(self, runs_dir: Path, interval_s: float = POLL_INTERVAL_SECONDS) -> None:
        super().__init__("host", self._read_load, interval_s=interval_s)
        self._runs_dir = runs_dir

    def _read_load(self) -> HostLoad:
        import psutil

        # Without a previous call, psutil would return 0.
        cpu = psutil.cpu_percent(FIRST_CPU_SECONDS if self.value is None else None)
        memory = psutil.virtual_memory()
        disk_free = None
        with suppress(OSError):
            disk_free = free_bytes(self._runs_dir.absolute())
        return HostLoad(cpu, memory.total - memory.available, memory.total, disk_free)
