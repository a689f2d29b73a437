"""Orphans: processes of this user whose supervisor or torchrun agent is dead, and which nobody ends.

A process with the marker of a run is one if nobody holds the lock of that run. torchrun is the parent of its workers,
which carry its environment; when it is killed, an init process adopts them. A process that only has an init process as
its parent may have been started so, as with `nohup`: it is detached, and no orphan.

A process is no orphan if /proc hides its environment, as for other users, or its agent, as in another container.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.command.devices import listed_pids
from engine.command.membership import MARKER, find_members, run_of
from engine.command.metric_files import METRICS_VARIABLE
from engine.command.run_id import last_run_id
from engine.command.spec import has_command
from engine.foreign.process import HostProcess, read_processes
from engine.gpus.snapshot import GpuProcess, Snapshot
from engine.runs.folder import RunFolder
from engine.utils.codec import replace
from engine.utils.process_table import (
    ProcessId,
    ProcessStat,
    children_by_parent,
    is_own,
    live_processes,
    read_proc,
    read_stat,
)

TORCHRUN = "torchrun"
# torchrun sets all of them for each worker; a shell script that sets the last ones starts no agent.
TORCHRUN_VARIABLES = (b"TORCHELASTIC_RUN_ID", b"MASTER_ADDR", b"MASTER_PORT")
WORKER_VARIABLE = b"LOCAL_RANK"
# Names of programs that adopt processes. Any other parent may be a torchrun agent, also as PID 1 of a container.
INIT_NAMES = frozenset({"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "runit"})
# Between two searches of all processes, which read 30 us of /proc each.
SEARCH_SECONDS = 10.0
MAX_ANCESTORS = 64


@dataclass(frozen=True)
class Origin:
    """The owner that started a process and ends it: the run in `folder` with the ID `run_id`, else the torchrun with
    these values of `TORCHRUN_VARIABLES`."""

    run_id: str = ""
    folder: str = ""
    torchrun: tuple[bytes, ...] = ()

    @property
    def label(self) -> str:
        return Path(self.folder).name or TORCHRUN


@dataclass(frozen=True)
class Orphans:
    """The leftover processes of one origin, parents first."""

    origin: Origin
    processes: tuple[HostProcess, ...]


def read_origin(pid: int) -> Origin | None:
    """Return what has started a process, None if that is unknown. Other users' environments are not readable."""
    entries = dict(entry.partition(b"=")[::2] for entry in read_proc(pid, "environ").split(b"\0"))
    run_id, metrics = (os.fsdecode(entries.get(name.encode(), b"")) for name in (MARKER, METRICS_VARIABLE))
    # A supervisor inside another run overwrites the marker with zeros.
    if run_id.strip("0"):
        return Origin(run_id, str(Path(metrics).parent.parent)) if metrics.startswith("/") else None
    values = tuple(entries.get(name, b"") for name in TORCHRUN_VARIABLES)
    return Origin(torchrun=values) if all(values) and WORKER_VARIABLE in entries else None


def ownerless_run_id(folder: RunFolder) -> str | None:
    """Return the ID of the last start of a command without an owner, as `last_run_id` does; None if it has one."""
    if not has_command(folder) or not folder.is_own or folder.is_owned():
        return None
    return last_run_id(folder)


class OrphanFinder:
    """Finds orphans. `mark` is for each snapshot of the GPUs: it reads little, and searches all processes only if a
    process on a GPU may be an orphan."""

    def __init__(self) -> None:
        self._origins: dict[ProcessId, Origin | None] = {}
        self._found: dict[Origin, list[ProcessId]] = {}
        self._searched_at = float("-inf")

    def mark(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with its orphans and detached processes. A recording is that of another time."""
        if snapshot.source.kind != "driver":
            return snapshot
        pids = listed_pids(snapshot)

        def mark(process: GpuProcess) -> GpuProcess:
            return self._mark(process) if process.pid in pids else process

        gpus = tuple(
            replace(gpu, processes=replace(gpu.processes, value=tuple(map(mark, gpu.processes.value))))
            if gpu.processes.value
            else gpu
            for gpu in snapshot.gpus
        )
        return replace(snapshot, gpus=gpus)

    def _mark(self, process: GpuProcess) -> GpuProcess:
        status = read_stat(process.pid)
        if status is None or process.user.value is None:
            return process
        found, origin = ProcessId(process.pid, status.start_ticks), self._origin(process.pid, status)
        if origin is not None and (origin.run_id or self._is_adopted(process.pid, origin)):
            if time.monotonic() - self._searched_at > SEARCH_SECONDS:
                self._searched_at, self._found = time.monotonic(), self.search()
            if found in self._found.get(origin, ()):
                return replace(process, orphan_of=origin.label, detached=is_init(status.parent))
        return replace(process, detached=is_init(status.parent))

    def search(self) -> dict[Origin, list[ProcessId]]:
        """Return all orphans of this user, with their descendants, by origin."""
        processes = live_processes()
        origins = {
            pid: origin
            for pid, status in processes.items()
            if is_own(pid) and (origin := self._origin(pid, status)) is not None
        }
        self._origins = {each: origin for each, origin in self._origins.items() if each.pid in processes}
        found: dict[Origin, list[ProcessId]] = {}
        for origin in dict.fromkeys(origins.values()):
            if origin.run_id:
                folder, run_id = RunFolder(Path(origin.folder)), origin.run_id
                is_left = ownerless_run_id(folder) == run_id
                leftover = find_members(run_id) if is_left else []
            else:
                leftover = _workers(origin, origins, processes)
            if leftover:
                found[origin] = leftover
        return found

    def list(self) -> list[Orphans]:
        """Return all orphans of this user as trees."""
        return [Orphans(origin, read_processes(found)) for origin, found in self.search().items()]

    def _origin(self, pid: int, status: ProcessStat) -> Origin | None:
        process = ProcessId(pid, status.start_ticks)
        # The program that a process has just started may have another environment.
        if self._origins.get(process) is None:
            self._origins[process] = read_origin(pid) if is_own(pid) else None
        return self._origins[process]

    def _is_adopted(self, pid: int, origin: Origin) -> bool:
        """Whether an init process is the parent of the worker that this process is, or descends from."""
        for _ in range(MAX_ANCESTORS):
            status = read_stat(pid)
            if status is None or is_init(status.parent):
                return status is not None
            parent = read_stat(status.parent)
            if parent is None or self._origin(status.parent, parent) != origin:
                return False
            pid = status.parent
        return False


def _workers(origin: Origin, origins: dict[int, Origin], processes: dict[int, ProcessStat]) -> list[ProcessId]:
    """Return the workers of a torchrun that is dead, and their descendants.

    Another one may have the same port and ID later, so an agent that started after a worker is not its agent."""
    members = [pid for pid, each in origins.items() if each == origin]
    tops = [pid for pid in members if origins.get(processes[pid].parent) != origin]
    agents = [
        processes[parent].start_ticks
        for pid in tops
        if (parent := processes[pid].parent) in processes and not is_init(parent)
    ]
    # A parent that /proc does not show is in another PID namespace, and may be the agent.
    if any(processes[pid].parent == 0 for pid in tops):
        return []
    orphans = [
        pid
        for pid in tops
        if is_init(processes[pid].parent) and all(start > processes[pid].start_ticks for start in agents)
    ]
    return [ProcessId(pid, processes[pid].start_ticks) for pid in _with_descendants(orphans, processes)]


def _with_descendants(roots: Iterable[int], processes: dict[int, ProcessStat]) -> Iterator[int]:
    children, pending = children_by_parent(processes), list(roots)
    while pending:
        pid = pending.pop(0)
        yield pid
        # A run that was started inside has its own marker, its supervisor an erased one, and goes on.
        pending += [child for child in children.get(pid, []) if run_of(child) is None]


def is_init(pid: int) -> bool:
    """Whether a process is known to be one that adopts others: that of the host, of a container or of a user."""
    status = read_stat(pid)
    return status is not None and status.name in INIT_NAMES


def leftover_finder(origin: Origin) -> Callable[[], list[ProcessId]]:
    """Return what finds the orphans of an origin that are left, for `engine.command.stop`."""
    return lambda: OrphanFinder().search().get(origin, [])
