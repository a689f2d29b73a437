"""The past load of a run's ranks: of GPUs from the journal, of CPU ranks measured while the run is watched."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from tui.charts.history import LoadHistory

if TYPE_CHECKING:
    from engine.runs.events import GpuEvent, RunStarted


def cpu_load_key(rank: int) -> str:
    """Return the key of a rank's CPU utilization in `RankLoads.histories`."""
    return f"cpu:{rank}"


class RankLoads:
    """Histories of the GPU utilization by UUID and of the CPU utilization by `cpu_load_key`, in percent."""

    def __init__(self) -> None:
        self.histories: dict[str, LoadHistory] = {}
        self.first_time = 0.0
        """Unix seconds of the first value; 0 without one."""
        self._processes: dict[int, Any] = {}

    def add(self, event: GpuEvent) -> None:
        """Add the readings of a `gpus` event."""
        for sample in event.gpus:
            self._add(str(sample.uuid), event.time, sample.util)

    def measure_cpu(self, started: RunStarted, time: float) -> None:
        """Add the CPU utilization of the ranks on this host since the previous call, in percent of their cores."""
        import psutil

        for rank in started.ranks:
            if rank.device != "cpu" or rank.host != socket.gethostname():
                continue
            try:
                process = self._processes.get(rank.pid)
                if process is None:
                    process = self._processes[rank.pid] = psutil.Process(rank.pid)
                    process.cpu_percent()  # the first call has no interval to measure
                    continue
                self._add(cpu_load_key(rank.rank), time, process.cpu_percent() / max(started.cores, 1))
            except (psutil.Error, ValueError):
                # ValueError: the PID, which a journal names, is negative.
                continue

    def _add(self, key: str, time: float, value: float | None) -> None:
        self.first_time = self.first_time or time
        self.histories.setdefault(key, LoadHistory()).add(time, value)
