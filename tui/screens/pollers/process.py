"""The poller of a process: its tree, what it uses of the host, its log, and the runs that it writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.text import Text

from engine.gpus.snapshot import Gpu, GpuProcess, Snapshot
from engine.runs.claim import read_claim
from engine.runs.folder import RunFolder
from engine.watch.folders import ForeignRun
from engine.watch.process import (
    ProcessDetails,
    ProcessId,
    ProcessTree,
    find_process_runs,
    read_details,
    read_tree,
    started_at,
)
from tui.screens.pollers.run import read_log_tail
from tui.screens.pollers.watched import POLL_INTERVAL_SECONDS, Poller
from tui.screens.tables.process import GpuUses, status_line

# Runs may appear minutes after the start. A search takes at most this share of the time.
SEARCH_SECONDS, SEARCH_SHARE = 3.0, 0.05


@dataclass(frozen=True)
class ProcessReading:
    """What is known of a process. `tree` is the last one after it has ended. `cpu_percent` is that of each process by
    its ID, of one core, since the reading before. `log` is the file that was written last, with its end. `details` are
    those of the root."""

    tree: ProcessTree
    ended_at: float | None = None
    cpu_percent: Mapping[int, float] = field(default_factory=dict)
    runs: tuple[ForeignRun, ...] = ()
    has_searched: bool = False
    log: Path | None = None
    log_lines: tuple[str, ...] = ()
    details: ProcessDetails | None = None

    @property
    def total_cpu_percent(self) -> float | None:
        """CPU use of the whole tree; None if it is not known yet."""
        return sum(self.cpu_percent.values()) if self.cpu_percent else None

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the whole tree. Pages that processes share count for each."""
        return sum(process.memory_bytes for process in self.tree.processes)

    def loads(self, snapshot: Snapshot | None) -> dict[str, float | None]:
        """Return what its processes use now: CPU in percent of one core, memory of the host and of GPUs in bytes."""
        held = [use.gpu_memory.value for _, use in self.gpu_uses(snapshot) if use.gpu_memory.value is not None]
        return {"cpu": self.total_cpu_percent, "memory": self.memory_bytes, "gpu_memory": sum(held) if held else None}

    def gpu_uses(self, snapshot: Snapshot | None) -> GpuUses:
        """Return what its processes use of the GPUs."""
        return gpu_uses(snapshot, {process.id.pid for process in self.tree.processes})

    def status_line(self, snapshot: Snapshot | None) -> Text:
        """Return the line about the process above the screen of its run."""
        return status_line(self.tree, self.gpu_uses(snapshot), self.total_cpu_percent, self.memory_bytes, self.ended_at)


class ProcessPoller(Poller):
    """Publishes the latest reading of a process. One that has ended stays until another one takes its place.

    No `Watched`: each reading continues the one before.
    """

    def __init__(
        self, find: Callable[[], ProcessId | None], interval_s: float = POLL_INTERVAL_SECONDS, *, searches: bool = True
    ) -> None:
        """`find` returns the process, None if it is not seen. With `searches`, its log and the runs that it writes are
        read, too."""
        super().__init__("process", interval_s)
        self._find, self._searches = find, searches
        self.process: ProcessId | None = None
        """The process that the latest poll read; None before the first."""
        self.latest: ProcessReading | None = None
        self._cpu: dict[ProcessId, float] = {}
        self._cpu_time = self._next_search = 0.0

    def poll(self) -> None:
        process, before = self.process, self.latest
        if process is None or before is None or before.ended_at is not None:
            found = self._find()
            if found is None or (found == process and before is not None):
                return
            self.process, process, before = found, found, None
            self._cpu, self._next_search = {}, 0.0
        tree = read_tree(process)
        if tree.processes:
            now = ProcessReading(tree, None, self._cpu_percent(tree))
        else:
            now = ProcessReading(tree if before is None else before.tree, time.time())
        self.latest = self._with_runs(process, now, before) if self._searches else now

    def _cpu_percent(self, tree: ProcessTree) -> dict[int, float]:
        now, seconds = time.monotonic(), {process.id: process.cpu_seconds for process in tree.processes}
        before, self._cpu = self._cpu, seconds
        passed, self._cpu_time = now - self._cpu_time, now
        return {key.pid: max(used - before[key], 0.0) / passed * 100 for key, used in seconds.items() if key in before}

    def _with_runs(self, process: ProcessId, now: ProcessReading, before: ProcessReading | None) -> ProcessReading:
        """Return the reading with the runs of the process, its log and its details."""
        runs, has_searched = (before.runs, before.has_searched) if before is not None else ((), False)
        if now.ended_at is not None:
            # What was written last is found, too.
            runs, has_searched = runs or find_process_runs(now.tree, started_at(process)).runs, True
        elif time.monotonic() >= self._next_search:
            if before is None:
                self.latest = now
            began = time.monotonic()
            found = () if now.tree.own_run is not None else find_process_runs(now.tree, started_at(process)).runs
            runs, has_searched = found or runs, True
            took = time.monotonic() - began
            self._next_search = time.monotonic() + max(SEARCH_SECONDS, took / SEARCH_SHARE)
        log, lines = _read_log(now.tree)
        details = before.details if before is not None else None
        if now.ended_at is None:
            details = read_details(process.pid)
        return replace(now, runs=runs, has_searched=has_searched, log=log, log_lines=lines, details=details)

    def has_result(self) -> bool:
        return self.latest is not None and (self.latest.has_searched or not self._searches)


def owner_of(folder: RunFolder) -> ProcessId | None:
    """Return the process that owns a run of gputrain, if it is on this host."""
    claim = read_claim(folder.owner)
    if claim is None or claim.pid is None or claim.start_ticks is None or not claim.is_process_here:
        return None
    return ProcessId(claim.pid, claim.start_ticks)


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
