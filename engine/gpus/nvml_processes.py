"""Processes on a GPU as NVML lists them, also through the handles of its MIG devices, and for how long each has been
idle. Called by `sampler`.

`engine.gpus.processes` adds what the host knows about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pynvml as nv

from engine.gpus.nvml import MAX_VALUE, VALUES_NOT_AVAILABLE, query
from engine.gpus.snapshot import Measurement, MigInstance, current_time

MICROSECONDS = 1_000_000
# After a longer gap, such as a driver that hangs, nobody knows what the processes did.
MAX_GAP_SECONDS = 15.0
IDLE_UNKNOWN = "the driver does not report which process computes"


class NvmlProcess(NamedTuple):
    """A process as NVML lists it. `instance` and `compute_instance` are its MIG IDs, `gpu_memory` is in bytes."""

    pid: int
    kind: str
    instance: int | None
    compute_instance: int | None
    gpu_memory: Measurement[int]


def running_processes(
    handle: Any, mig_devices: Sequence[tuple[Any, MigInstance]] = ()
) -> Measurement[list[NvmlProcess]]:
    """Return the compute and graphics processes on a GPU. A process that is both is listed as compute.

    The handle of a GPU in MIG mode lists them only to privileged users, the handles of its MIG devices to everyone. So
    all are queried, and the processes are known if one of them answers.
    """
    answers = [_listed_processes(handle)]
    for mig_handle, instance in mig_devices:
        answers.append(_listed_processes(mig_handle, instance))
    known = [answer.value for answer in answers if answer.value is not None]
    if not known:
        return answers[0]
    merged: dict[tuple[int, int | None, int | None], NvmlProcess] = {}
    for process in (process for processes in known for process in processes):
        merged.setdefault((process.pid, process.instance, process.compute_instance), process)
    located = {process.pid for process in merged.values() if process.instance is not None}
    processes = [process for process in merged.values() if process.instance is not None or process.pid not in located]
    return Measurement(processes, answers[0].time)


def _listed_processes(handle: Any, instance: MigInstance | None = None) -> Measurement[list[NvmlProcess]]:
    """Return the processes that one handle lists; `instance` is the MIG device, if it is the handle of one."""
    compute = query(lambda: nv.nvmlDeviceGetComputeRunningProcesses(handle))
    if compute.value is None:
        return compute
    # A client of an MPS server may be in the list of MPS alone (nvidia-smi shows M, or M+C if it is in both).
    mps = query(lambda: nv.nvmlDeviceGetMPSComputeRunningProcesses(handle))
    graphics = query(lambda: nv.nvmlDeviceGetGraphicsRunningProcesses(handle))
    by_pid: dict[tuple[int, int | None, int | None], NvmlProcess] = {}
    for kind, reading in (("compute", compute), ("compute", mps), ("graphics", graphics)):
        for process in reading.value or []:
            used_bytes = process.usedGpuMemory
            is_known = used_bytes is not None and used_bytes not in VALUES_NOT_AVAILABLE and used_bytes <= MAX_VALUE
            gpu_memory: Measurement[int] = Measurement(
                int(used_bytes) if is_known else None,
                reading.time,
                None if is_known else "not reported by the driver",
                unit="B",
            )
            ids = _known_id(process.gpuInstanceId), _known_id(process.computeInstanceId)
            if instance is not None and ids[0] is None:
                ids = instance.gpu_instance, instance.compute_instance
            by_pid.setdefault((process.pid, *ids), NvmlProcess(int(process.pid), kind, *ids, gpu_memory))
    return Measurement(list(by_pid.values()), compute.time)


def _known_id(value: int) -> int | None:
    return None if value in VALUES_NOT_AVAILABLE else int(value)


class IdleTime(NamedTuple):
    """For how many seconds a process has not computed, as far as it was watched. With `at_least`, it has not computed
    since then."""

    seconds: Measurement[float]
    at_least: bool


class ProcessActivity:
    """When each process of one GPU has last computed.

    ``nvmlDeviceGetProcessUtilization`` (nvidia-smi pmon) reports the utilization per process, only of those that were
    not idle. Where it does not, all processes count as busy while the GPU is.
    """

    def __init__(self) -> None:
        self._watched_since: dict[int, float] = {}
        self._busy_at: dict[int, float] = {}
        self._updated_at = float("-inf")

    def update(self, handle: Any, util: Measurement[int], pids: Iterable[int]) -> dict[int, IdleTime]:
        """Return the idle time of each process. `util` is the utilization of the GPU, in percent."""
        now, pids = current_time(), set(pids)
        busy = self._busy_processes(handle, util, pids, now)
        if now - self._updated_at > MAX_GAP_SECONDS:
            self._watched_since, self._busy_at = {}, {}
        self._watched_since = {pid: self._watched_since.get(pid, now) for pid in pids}
        if busy is None:
            self._busy_at.clear()
            self._updated_at = float("-inf")
            return {pid: IdleTime(Measurement(None, now, IDLE_UNKNOWN, "s"), at_least=False) for pid in pids}
        self._updated_at = now
        self._busy_at = {pid: at for pid, at in (self._busy_at | busy).items() if pid in pids}
        return {
            pid: IdleTime(
                Measurement(round(now - self._busy_at.get(pid, since), 1), now, unit="s"), pid not in self._busy_at
            )
            for pid, since in self._watched_since.items()
        }

    def _busy_processes(
        self, handle: Any, util: Measurement[int], pids: Iterable[int], now: float
    ) -> dict[int, float] | None:
        """Return when processes have computed since the last call, in Unix seconds; None if that is unknown."""
        since = max(self._updated_at, now - MAX_GAP_SECONDS)
        samples = query(lambda: nv.nvmlDeviceGetProcessUtilization(handle, int(since * MICROSECONDS)))
        if samples.value:
            busy: dict[int, float] = {}
            for sample in samples.value:
                # Graphics, decoding and copies are use, too.
                if sample.smUtil or sample.memUtil or sample.encUtil or sample.decUtil:
                    at = min(sample.timeStamp / MICROSECONDS, now)
                    busy[int(sample.pid)] = max(at, busy.get(int(sample.pid), 0.0))
            return busy
        if util.value is None:
            return None
        return dict.fromkeys(pids, now) if util.value > 0 else {}
