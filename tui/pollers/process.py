"""The poller of a process that is watched: its tree, what it uses of the host, its log, and the runs that it writes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.foreign.folders import ForeignRun, FoundRuns
from engine.foreign.process import ProcessId, ProcessTree, find_process_runs, read_tree, started_at
from engine.gpus.snapshot import Gpu, GpuProcess, Snapshot
from tui.pollers.runs import read_log_tail
from tui.pollers.watched import POLL_INTERVAL_SECONDS, Poller

# Runs may appear minutes after the start. A search takes at most this share of the time.
SEARCH_SECONDS, SEARCH_SHARE = 3.0, 0.05


@dataclass(frozen=True)
class ProcessReading:
    """What is known of a process. `tree` is the last one after it has ended. `cpu_percent` is that of each process by
    its ID, of one core, since the reading before. `log` is the file that was written last, with its end."""

    tree: ProcessTree
    ended_at: float | None = None
    cpu_percent: Mapping[int, float] = field(default_factory=dict)
    runs: tuple[ForeignRun, ...] = ()
    has_searched: bool = False
    log: Path | None = None
    log_lines: tuple[str, ...] = ()

    @property
    def total_cpu_percent(self) -> float | None:
        """CPU use of the whole tree; None if it is not known yet."""
        return sum(self.cpu_percent.values()) if self.cpu_percent else None

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the whole tree. Pages that processes share count for each."""
        return sum(process.memory_bytes for process in self.tree.processes)


class ProcessPoller(Poller):
    """Publishes the latest reading of a process, until it has ended.

    No `Watched`: each reading continues the one before.
    """

    def __init__(self, root: ProcessId, interval_s: float = POLL_INTERVAL_SECONDS) -> None:
        super().__init__("process", interval_s)
        self.root = root
        self.latest: ProcessReading | None = None
        self._cpu: dict[ProcessId, float] = {}
        self._cpu_time = 0.0
        self._next_search = 0.0

    def poll(self) -> None:
        before = self.latest
        if before is not None and before.ended_at is not None:
            return
        tree = read_tree(self.root)
        if not tree.processes:
            last = ProcessReading(tree) if before is None else before
            # What was written last is found, too.
            runs = last.runs or find_process_runs(last.tree, started_at(self.root)).runs
            self.latest = ProcessReading(last.tree, time.time(), {}, runs, True, *_read_log(last.tree))
            return
        cpu = self._cpu_percent(tree)
        runs, has_searched = (before.runs, before.has_searched) if before is not None else ((), False)
        if time.monotonic() >= self._next_search:
            if before is None:
                self.latest = ProcessReading(tree, None, cpu)
            began = time.monotonic()
            runs, has_searched = self._search(tree).runs or runs, True
            took = time.monotonic() - began
            self._next_search = time.monotonic() + max(SEARCH_SECONDS, took / SEARCH_SHARE)
        self.latest = ProcessReading(tree, None, cpu, runs, has_searched, *_read_log(tree))

    def _search(self, tree: ProcessTree) -> FoundRuns:
        return FoundRuns(()) if tree.own_run is not None else find_process_runs(tree, started_at(self.root))

    def _cpu_percent(self, tree: ProcessTree) -> dict[int, float]:
        now, seconds = time.monotonic(), {process.id: process.cpu_seconds for process in tree.processes}
        before, self._cpu = self._cpu, seconds
        passed, self._cpu_time = now - self._cpu_time, now
        return {key.pid: max(used - before[key], 0.0) / passed * 100 for key, used in seconds.items() if key in before}

    def has_result(self) -> bool:
        return self.latest is not None and self.latest.has_searched


def _read_log(tree: ProcessTree) -> tuple[Path | None, tuple[str, ...]]:
    """Return the log of the tree that was written last, and its end."""
    dated = []
    for path in tree.logs:
        try:
            dated.append((path.lstat().st_mtime_ns, path))
        except OSError:
            continue
    for _, path in sorted(dated, reverse=True):
        try:
            return path, read_log_tail(path)
        except OSError:
            continue
    return None, ()


def gpu_uses(snapshot: Snapshot | None, pids: Collection[int]) -> list[tuple[Gpu, GpuProcess]]:
    """Return what some processes use of the GPUs."""
    return [
        (gpu, process)
        for gpu in (snapshot.gpus if snapshot is not None else ())
        for process in gpu.processes.value or ()
        if process.pid in pids
    ]


def find_watched(pid: int, start_ticks: int) -> Path | ProcessId | None:
    """Return what can be watched of a process: the folder of its run of gputrain, or itself if it writes other runs."""
    process = ProcessId(pid, start_ticks)
    tree = read_tree(process)
    if tree.own_run is not None:
        return tree.own_run
    return process if find_process_runs(tree, started_at(process)).runs else None
