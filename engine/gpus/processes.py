"""Who the processes on a GPU are: what the host knows of a pid, and which are ranks of our own runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil

from engine.gpus.nvml import Tenant
from engine.gpus.reservation import Held, HeldRank
from engine.gpus.snapshot import Missing, Process, Reading

UNKNOWN_PID = "no such process here; it may be in another container"
COMMAND_SIGNS = 400


@dataclass(frozen=True)
class _Person:
    """A process whose name and owner were looked up once."""

    process: psutil.Process
    user: Reading[str]
    command: Reading[str]


class ProcessTable:
    """Looks pids up on this host, and keeps what does not change."""

    def __init__(self) -> None:
        self._known: dict[int, _Person] = {}

    def describe(self, tenants: Sequence[Tenant], ranks: Sequence[HeldRank]) -> tuple[Process, ...]:
        """The processes on one GPU, on which these ranks of our own compute.

        A rank is found by its pid. In a container the driver may list the host's pids, or none: a rank that is not
        found is then the one process that nobody knows, or one more that the driver keeps to itself.
        """
        shown = {tenant.pid for tenant in tenants} | {rank.pid for rank in ranks}
        self._known = {pid: one for pid, one in self._known.items() if pid in shown and one.process.is_running()}
        by_pid = {rank.pid: rank for rank in ranks}
        found = [self._look(tenant.pid, tenant, by_pid.get(tenant.pid)) for tenant in tenants]
        listed = {tenant.pid for tenant in tenants}
        missing = [rank for rank in ranks if rank.pid not in listed and psutil.pid_exists(rank.pid)]
        phantoms = [place for place, one in enumerate(tenants) if one.pid not in self._known and one.kind == "compute"]
        if len(missing) == 1 and len(phantoms) == 1:
            place = phantoms[0]
            found[place] = replace(self._look(missing[0].pid, tenants[place], missing[0]), pid=tenants[place].pid)
        else:
            unlisted: Reading[int] = Reading(None, time.time(), "the driver does not list this process")
            found += [self._look(rank.pid, Tenant(rank.pid, "compute", None, unlisted), rank) for rank in missing]
        return tuple(found)

    def _look(self, pid: int, tenant: Tenant, rank: HeldRank | None) -> Process:
        now = time.time()
        user: Reading[str] = Reading(None, now, UNKNOWN_PID)
        command: Reading[str] = user
        cpu: Reading[float] = Reading(None, now, UNKNOWN_PID)
        memory: Reading[int] = Reading(None, now, UNKNOWN_PID)
        with suppress(psutil.NoSuchProcess):
            fresh = pid not in self._known
            person = self._person(pid)
            user, command = person.user, person.command
            used = _permitted(person.process.cpu_percent)
            cpu = Reading(None, now, "needs a second look") if fresh and used.reason is None else used
            memory = _permitted(lambda: person.process.memory_info().rss)
        kind: Any = tenant.kind
        run, number = (rank.run, rank.rank) if rank else (None, None)
        return Process(pid, kind, tenant.instance, user, command, tenant.gpu_memory, cpu, memory, run, number)

    def _person(self, pid: int) -> _Person:
        """Raises psutil.NoSuchProcess."""
        if pid not in self._known:
            process = psutil.Process(pid)
            self._known[pid] = _Person(process, _permitted(process.username), _permitted(lambda: _command(process)))
        return self._known[pid]


def _command(process: psutil.Process) -> str:
    # A kernel thread or a zombie has no command line.
    return (" ".join(process.cmdline()) or process.name())[:COMMAND_SIGNS]


def _permitted(question: Any) -> Reading[Any]:
    """Raises psutil.NoSuchProcess."""
    now = time.time()
    try:
        return Reading(question(), now)
    except (psutil.AccessDenied, KeyError):
        return Reading(None, now, Missing.NO_PERMISSION)


def ranks_on(uuids: Sequence[str], held: Sequence[Held]) -> list[HeldRank]:
    """The ranks of these runs that said that CUDA gave them one of these devices."""
    return [rank for one in held for rank in one.ranks if rank.uuid in uuids]
