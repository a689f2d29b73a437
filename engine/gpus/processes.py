"""Processes on a GPU: user, command and host metrics of each NVML PID, and the run and rank it belongs to.

Called by `sampler`; the ranks come from `reservation_reader`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psutil

from engine.base.codec import replace
from engine.gpus.nvml_processes import IdleTime, NvmlProcess
from engine.gpus.reservation_entry import ReservationInfo, ReservedRank
from engine.gpus.snapshot import GpuProcess, Measurement, Missing, current_time

UNKNOWN_PID_REASON = "no such process here; it may be in another container"
MAX_COMMAND_CHARS = 400
# Any user can give a process this name. `selection` then still counts its memory as that of an unlisted process.
MPS_SERVER_NAME = "nvidia-cuda-mps-server"


@dataclass(frozen=True)
class _ProcessIdentity:
    """Name, user, command and ancestors of a process, looked up once."""

    process: psutil.Process
    ancestors: tuple[int, ...]
    name: Measurement[str]
    user: Measurement[str]
    command: Measurement[str]


class ProcessTable:
    """Looks up PIDs on this host and caches user and command."""

    def __init__(self) -> None:
        self._identities: dict[int, _ProcessIdentity] = {}

    def describe(
        self,
        nvml_processes: Sequence[NvmlProcess],
        ranks: Sequence[ReservedRank],
        idle: Mapping[int, IdleTime] = MappingProxyType({}),
    ) -> tuple[GpuProcess, ...]:
        """Return the processes on one GPU, given those that NVML lists, the ranks that run on it, and idle times by
        PID.

        Ranks are matched by PID; a process below a rank is one of its run, such as a worker of torchrun below the
        command of a run. In a container NVML may list PIDs of the host's PID namespace, or no processes. So if
        exactly one rank and one compute process remain unmatched, they are the same process. Any other unmatched rank
        is added to the list, with unknown GPU memory.
        """
        pids = {process.pid for process in nvml_processes} | {rank.pid for rank in ranks}
        self._identities = {
            pid: identity for pid, identity in self._identities.items() if pid in pids and identity.process.is_running()
        }
        by_pid = {rank.pid: rank for rank in ranks}
        found = [self._rank_of(process.pid, by_pid) for process in nvml_processes]
        described = [
            self._describe_process(process.pid, process, rank)
            for process, rank in zip(nvml_processes, found, strict=True)
        ]
        listed_ranks = {rank.pid for rank in found if rank is not None}
        unlisted_ranks = [rank for rank in ranks if rank.pid not in listed_ranks and psutil.pid_exists(rank.pid)]
        unknown_positions = [
            position
            for position, process in enumerate(nvml_processes)
            if process.pid not in self._identities and process.kind == "compute"
        ]
        if len(unlisted_ranks) == 1 and len(unknown_positions) == 1:
            position = unknown_positions[0]
            described[position] = replace(
                self._describe_process(unlisted_ranks[0].pid, nvml_processes[position], unlisted_ranks[0]),
                pid=nvml_processes[position].pid,
            )
        else:
            unlisted_memory: Measurement[int] = Measurement(
                None, current_time(), "the driver does not list this process", unit="B"
            )
            described += [
                self._describe_process(rank.pid, NvmlProcess(rank.pid, "compute", None, None, unlisted_memory), rank)
                for rank in unlisted_ranks
            ]
        return tuple(
            process
            if (time := idle.get(process.pid)) is None
            else replace(process, idle=time.seconds, idle_at_least=time.at_least)
            for process in described
        )

    def _rank_of(self, pid: int, ranks: Mapping[int, ReservedRank]) -> ReservedRank | None:
        """Return the rank that a process is, or the one that has started it, None if it belongs to no run."""
        if pid in ranks or not ranks:
            return ranks.get(pid)
        with suppress(psutil.NoSuchProcess):
            return next((ranks[parent] for parent in self._identify(pid).ancestors if parent in ranks), None)
        return None

    def _describe_process(self, pid: int, nvml_process: NvmlProcess, rank: ReservedRank | None) -> GpuProcess:
        now = current_time()
        user: Measurement[str] = Measurement(None, now, UNKNOWN_PID_REASON)
        command: Measurement[str] = user
        cpu: Measurement[float] = Measurement(None, now, UNKNOWN_PID_REASON, unit="%")
        memory: Measurement[int] = Measurement(None, now, UNKNOWN_PID_REASON, unit="B")
        run_time: Measurement[float] = Measurement(None, now, UNKNOWN_PID_REASON, unit="s")
        kind: Any = nvml_process.kind
        with suppress(psutil.NoSuchProcess):
            is_new = pid not in self._identities
            identity = self._identify(pid)
            user, command = identity.user, identity.command
            if kind == "compute" and rank is None and identity.name.value == MPS_SERVER_NAME:
                kind = "mps server"
            cpu = _read_if_permitted(identity.process.cpu_percent, "%")
            if is_new and cpu.reason is None:
                cpu = cpu.without_value("needs a second sample")
            memory = _read_if_permitted(lambda: identity.process.memory_info().rss, "B")
            run_time = _read_if_permitted(lambda: max(now - identity.process.create_time(), 0.0), "s")
        run, rank_number = (rank.run, rank.rank) if rank else (None, None)
        return GpuProcess(
            pid=pid,
            kind=kind,
            instance=nvml_process.instance,
            user=user,
            command=command,
            gpu_memory=nvml_process.gpu_memory,
            cpu=cpu,
            memory=memory,
            run_time=run_time,
            run=run,
            rank=rank_number,
            compute_instance=nvml_process.compute_instance,
        )

    def _identify(self, pid: int) -> _ProcessIdentity:
        """Return the cached user and command of a PID. Raises psutil.NoSuchProcess."""
        if pid not in self._identities:
            process = psutil.Process(pid)
            self._identities[pid] = _ProcessIdentity(
                process,
                _read_if_permitted(lambda: tuple(parent.pid for parent in process.parents())).value or (),
                _read_if_permitted(process.name),
                _read_if_permitted(process.username),
                _read_if_permitted(lambda: _command(process)),
            )
        return self._identities[pid]


def _command(process: psutil.Process) -> str:
    # Kernel threads and zombies have an empty command line.
    return (" ".join(process.cmdline()) or process.name())[:MAX_COMMAND_CHARS]


def _read_if_permitted(call: Any, unit: str = "") -> Measurement[Any]:
    """Return the result as a reading, without a value if access is denied. Raises psutil.NoSuchProcess."""
    now = current_time()
    try:
        return Measurement(call(), now, unit=unit)
    except (psutil.AccessDenied, KeyError):
        return Measurement(None, now, Missing.NO_PERMISSION, unit)


def ranks_on(uuids: Sequence[str], reservations: Sequence[ReservationInfo]) -> list[ReservedRank]:
    """Return the ranks in `reservations` whose CUDA device has one of these UUIDs."""
    return [rank for reservation in reservations for rank in reservation.ranks if rank.uuid in uuids]
