"""What of this machine a run gets: its devices, and each rank's threads and loader processes."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config
from engine.gpus.selection import Device
from engine.problems import UsageError

RANKS_PER_CORE = 4
MOST_WORKERS = 8


@dataclass(frozen=True)
class Plan:
    """The share of each of the `ranks` on this host. `devices` holds the UUID of a GPU or a MIG instance for each of
    them, or of the one that this rank sees, or "cpu"; `parents` the UUID of the GPU that an instance is of. `workers`
    are the loader processes a rank where the config names a number, None where the data decides."""

    devices: tuple[str, ...]
    parents: tuple[str | None, ...]
    ranks: int
    threads: int
    workers: int | None

    def place(self, local_rank: int) -> int:
        """Which of `devices` a rank has; CUDA counts them in this order."""
        return local_rank if len(self.devices) > 1 else 0

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"

    @property
    def backend(self) -> str:
        return "nccl" if self.on_gpu else "gloo"


def cores() -> int:
    """CPU cores that this process may use: its affinity, and the quota of its control group where one is set."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return allowed


def plan(config: Config, gpus: Sequence[Device], local_ranks: int | None = None) -> Plan:
    """`gpus` are those that the run has to itself, none for the CPU; `local_ranks` is given where a launcher has
    already decided how many ranks this host has: it may show each of them one GPU only. Raises UsageError."""
    workers = None if config.data.workers == "auto" else config.data.workers
    if gpus:
        ranks = local_ranks or len(gpus)
        if 1 < len(gpus) < ranks:
            raise UsageError.one(
                "device.gpus", f"{ranks} ranks on this host need a GPU each, and there are {len(gpus)}; start fewer"
            )
        devices = tuple(gpu.uuid for gpu in gpus[:ranks])
        parents = tuple(gpu.parent for gpu in gpus[:ranks])
        return Plan(devices, parents, ranks, max(1, cores() // ranks), workers)
    ranks = local_ranks or config.device.ranks
    most = RANKS_PER_CORE * cores()
    if ranks > most:
        raise UsageError.one(
            "device.ranks", f"{ranks} ranks are too many for {cores()} cores; give {most} or fewer (4 a core)"
        )
    return Plan(("cpu",) * ranks, (None,) * ranks, ranks, max(1, cores() // ranks), workers)


def auto_workers(ranks: int, batch_size: int) -> int:
    return max(1, min(cores() // ranks, batch_size, MOST_WORKERS))


def prepare_environment(plan: Plan, environ: MutableMapping[str, str]) -> None:
    """Set what ranks must find in their environment before they import torch."""
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(plan.devices) if plan.on_gpu else ""
    environ.setdefault("OMP_NUM_THREADS", str(plan.threads))
