"""Processes on a GPU: user, command and host metrics of each NVML PID, and the run and rank it belongs to.

Called by `sampler`; the ranks come from `reservation`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil

from engine.gpus.nvml import NvmlProcess
from engine.gpus.reservation import ReservationInfo, ReservedRank
from engine.gpus.snapshot import GpuProcess, Missing, Reading

UNKNOWN_PID_REASON = "no such process here; it may be in another container"
MAX_COMMAND_CHARS = 400


@dataclass(frozen=True)
class _ProcessIdentity:
    """User and command of a process, looked up once."""

    process: psutil.Process
    user: Reading[str]
    command: Reading[str]


class ProcessTable:
    """Looks up PIDs on this host and caches user and command."""

    def __init__(self) -> None:
        self._identities: dict[int, _ProcessIdentity] = {}

    def describe(self, nvml_processes: Sequence[NvmlProcess], ranks: Sequence[ReservedRank]) -> tuple[GpuProcess, ...]:
        """Return the processes on one GPU, given those that NVML lists and the ranks that run on it.

        Ranks are matched by PID. In a container NVML may list PIDs of the host's PID namespace, or no processes. So if
        exactly one rank and one compute process remain unmatched, they are the same process. Any other unmatched rank
        is added to the list, with unknown GPU memory.
        """
        shown = {tenant.pid for tenant in nvml_processes} | {rank.pid for rank in ranks}
        self._identities = {
            pid: one for pid, one in self._identities.items() if pid in shown and one.process.is_running()
        }
        by_pid = {rank.pid: rank for rank in ranks}
        found = [self._describe_process(tenant.pid, tenant, by_pid.get(tenant.pid)) for tenant in nvml_processes]
        listed = {tenant.pid for tenant in nvml_processes}
        missing = [rank for rank in ranks if rank.pid not in listed and psutil.pid_exists(rank.pid)]
        phantoms = [
            place
            for place, one in enumerate(nvml_processes)
            if one.pid not in self._identities and one.kind == "compute"
        ]
        if len(missing) == 1 and len(phantoms) == 1:
            place = phantoms[0]
            found[place] = replace(
                self._describe_process(missing[0].pid, nvml_processes[place], missing[0]), pid=nvml_processes[place].pid
            )
        else:
            unlisted: Reading[int] = Reading(None, time.time(), "the driver does not list this process")
            found += [
                self._describe_process(rank.pid, NvmlProcess(rank.pid, "compute", None, unlisted), rank)
                for rank in missing
            ]
        return tuple(found)

    def _describe_process(self, pid: int, nvml_process: NvmlProcess, rank: ReservedRank | None) -> GpuProcess:
        now = time.time()
        user: Reading[str] = Reading(None, now, UNKNOWN_PID_REASON)
        command: Reading[str] = user
        cpu: Reading[float] = Reading(None, now, UNKNOWN_PID_REASON)
        memory: Reading[int] = Reading(None, now, UNKNOWN_PID_REASON)
        with suppress(psutil.NoSuchProcess):
            fresh = pid not in self._identities
            person = self._identify(pid)
            user, command = person.user, person.command
            used = _read_if_permitted(person.process.cpu_percent)
            cpu = Reading(None, now, "needs a second sample") if fresh and used.reason is None else used
            memory = _read_if_permitted(lambda: person.process.memory_info().rss)
        kind: Any = nvml_process.kind
        run, number = (rank.run, rank.rank) if rank else (None, None)
        return GpuProcess(
            pid=pid,
            kind=kind,
            instance=nvml_process.instance,
            user=user,
            command=command,
            gpu_memory=nvml_process.gpu_memory,
            cpu=cpu,
            memory=memory,
            run=run,
            rank=number,
        )

    def _identify(self, pid: int) -> _ProcessIdentity:
        """Return the cached user and command of a PID. Raises psutil.NoSuchProcess."""
        if pid not in self._identities:
            process = psutil.Process(pid)
            self._identities[pid] = _ProcessIdentity(
                process, _read_if_permitted(process.username), _read_if_permitted(lambda: _command(process))
            )
        return self._identities[pid]


def _command(process: psutil.Process) -> str:
    # Kernel threads and zombies have an empty command line.
    return (" ".join(process.cmdline()) or process.name())[:MAX_COMMAND_CHARS]


def _read_if_permitted(call: Any) -> Reading[Any]:
    """Return the result as a reading, without a value if access is denied. Raises psutil.NoSuchProcess."""
    now = time.time()
    try:
        return Reading(call(), now)
    except (psutil.AccessDenied, KeyError):
        return Reading(None, now, Missing.NO_PERMISSION)


def ranks_on(uuids: Sequence[str], reservations: Sequence[ReservationInfo]) -> list[ReservedRank]:
    """Return the ranks in `reservations` whose CUDA device has one of these UUIDs."""
    return [rank for one in reservations for rank in one.ranks if rank.uuid in uuids]
