"""What of this machine a run gets: its devices, and each rank's threads and loader processes."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config
from engine.gpus import choose
from engine.problems import UsageError

RANKS_PER_CORE = 4
MOST_WORKERS = 8


@dataclass(frozen=True)
class Plan:
    """The share of each rank on this host. `devices` holds a GPU's UUID or "cpu" for each of them."""

    devices: tuple[str, ...]
    threads: int
    workers: int | None
    """Loader processes a rank where the config names a number, None where the data decides."""

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


def plan(config: Config, local_ranks: int | None = None) -> Plan:
    """`local_ranks` is given where a launcher has already decided how many ranks this host has. Raises UsageError."""
    workers = None if config.data.workers == "auto" else config.data.workers
    if local_ranks is not None and config.device.gpus == "auto":
        gpus = choose("all") if _has_gpus() else []
    else:
        gpus = choose(config.device.gpus)
    if gpus:
        if local_ranks is not None and local_ranks > len(gpus):
            raise UsageError.one(
                "device.gpus",
                f"{local_ranks} ranks on this host need a GPU each, and there are {len(gpus)}; start fewer",
            )
        devices = tuple(gpu.uuid for gpu in gpus[:local_ranks])
    else:
        ranks = local_ranks or config.device.ranks
        most = RANKS_PER_CORE * cores()
        if ranks > most:
            raise UsageError.one(
                "device.ranks", f"{ranks} ranks are too many for {cores()} cores; give {most} or fewer (4 a core)"
            )
        devices = ("cpu",) * ranks
    return Plan(devices, max(1, cores() // len(devices)), workers)


def _has_gpus() -> bool:
    return bool(choose("auto")) or os.environ.get("CUDA_VISIBLE_DEVICES", "") not in ("", "-1")


def auto_workers(ranks: int, batch_size: int) -> int:
    return max(1, min(cores() // ranks, batch_size, MOST_WORKERS))


def prepare_environment(plan: Plan, environ: MutableMapping[str, str]) -> None:
    """Set what ranks must find in their environment before they import torch."""
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(plan.devices) if plan.on_gpu else ""
    environ.setdefault("OMP_NUM_THREADS", str(plan.threads))
