"""Load of the whole host: CPU, memory, network and the disk of the runs, read in a thread for the monitor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.gpus.snapshot import GpuProcess, Missing, Reading, current_time
from tui.charts.history import LoadHistory
from tui.pollers import Poller
from tui.text.host import HostLoad

if TYPE_CHECKING:
    import psutil

    from engine.runs.records import RankDevice

# CPU utilization is the mean since the previous poll.
POLL_INTERVAL_SECONDS = 1.0
FIRST_CPU_SECONDS = 0.2


class HostPoller(Poller):
    """Publishes the latest load of the host, and records the past of its CPU and memory."""

    def __init__(
        self,
        runs_dir: Path,
        interval_s: float = POLL_INTERVAL_SECONDS,
        find_ranks: Callable[[], Sequence[tuple[str, RankDevice]]] = tuple,
    ) -> None:
        """`find_ranks` returns the ranks to read, with the names of their runs."""
        super().__init__("host", interval_s)
        self._find_ranks = find_ranks
        self._rank_processes: dict[int, psutil.Process] = {}
        self.ranks: tuple[GpuProcess, ...] = ()
        """The processes of the ranks."""
        self._runs_dir = runs_dir
        self._network: tuple[float, int, int] | None = None
        """Monotonic time, and bytes sent and received, of the previous poll."""
        self.load: HostLoad | None = None
        self.cpu, self.memory = LoadHistory(), LoadHistory()

    def poll(self) -> None:
        import psutil

        # Without a previous call, psutil would return 0.
        cpu = psutil.cpu_percent(FIRST_CPU_SECONDS if self.load is None else None)
        memory = psutil.virtual_memory()
        sent, received = self._network_rates()
        self.load = HostLoad(cpu, memory.total - memory.available, memory.total, self._disk_free(), sent, received)
        self.record(time.time())
        self.ranks = tuple(self._read_ranks())

    def record(self, now: float) -> None:
        """Add the latest load to the past."""
        if self.load is not None:
            self.cpu.add(now, self.load.cpu_percent)
            self.memory.add(now, 100.0 * self.load.memory_used_bytes / max(self.load.memory_total_bytes, 1))

    def _read_ranks(self) -> Iterator[GpuProcess]:
        import psutil

        now, known = current_time(), self._rank_processes
        self._rank_processes = {}
        for run, rank in self._find_ranks():
            try:
                process = known.get(rank.pid) or psutil.Process(rank.pid)
                cpu = process.cpu_percent() if rank.pid in known else None
                user, command, memory = process.username(), " ".join(process.cmdline()), process.memory_info().rss
            except psutil.Error:
                continue
            self._rank_processes[rank.pid] = process
            yield GpuProcess(
                pid=rank.pid,
                kind="compute",
                instance=None,
                user=Reading(user, now),
                command=Reading(command, now),
                gpu_memory=Reading(None, now, Missing.NOT_SUPPORTED, unit="B"),
                cpu=Reading(cpu, now, None if cpu is not None else Missing.NOT_REQUESTED, unit="%"),
                memory=Reading(memory, now, unit="B"),
                run=run,
                rank=rank.rank,
            )

    def _disk_free(self) -> int | None:
        """Return the free space of the disk of the runs, which may not have a folder yet."""
        import shutil

        for folder in (self._runs_dir, *self._runs_dir.absolute().parents):
            try:
                return shutil.disk_usage(folder).free
            except FileNotFoundError:
                continue
            except OSError:
                return None
        return None

    def _network_rates(self) -> tuple[float | None, float | None]:
        """Return bytes/s sent and received since the previous poll; None in the first one."""
        import psutil

        now = time.monotonic()
        try:
            counters = psutil.net_io_counters(pernic=True) or {}
        except (OSError, RuntimeError):
            counters = {}
        used = [counter for name, counter in counters.items() if name != "lo"]
        sent, received = sum(counter.bytes_sent for counter in used), sum(counter.bytes_recv for counter in used)
        before, self._network = self._network, (now, sent, received)
        if before is None or not used or now <= before[0]:
            return None, None
        seconds = now - before[0]
        return max(sent - before[1], 0) / seconds, max(received - before[2], 0) / seconds
