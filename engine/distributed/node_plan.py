"""What of this machine a run gets: its devices, and each rank's threads and loader processes."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.config.schema import Config
from engine.gpus.selection import Device
from engine.utils.errors import Problem, UsageError
from engine.utils.host import RANKS_PER_CORE, cores

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class Plan:
    """The share of each of the `ranks` on this host. `devices` holds the UUID of a GPU or a MIG instance for each of
    them, or of the one that this rank sees, or "cpu"; of all GPUs where one rank has `devices_a_rank` of them;
    `parents` the UUID of the GPU that an instance is of. `workers` are the loader processes a rank where the config
    names a number, None where the data decides."""

    devices: tuple[str, ...]
    parents: tuple[str | None, ...]
    ranks: int
    threads: int
    workers: int | None
    backend: Backend
    devices_a_rank: int = 1

    def place(self, local_rank: int) -> int:
        """Which of `devices` a rank has, the first where it has several; CUDA counts them in this order."""
        return local_rank if len(self.devices) > 1 else 0

    def places(self, local_rank: int) -> range:
        """All of `devices` that a rank has."""
        first = self.place(local_rank)
        return range(first, first + self.devices_a_rank)

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"


def plan(config: Config, gpus: Sequence[Device], local_ranks: int | None = None) -> Plan:
    """`gpus` are those that the run has to itself, none for the CPU; `local_ranks` is given where a launcher has
    already decided how many ranks this host has: it may show each of them one GPU only. Raises UsageError."""
    problems = _problems(config, gpus, launched=local_ranks is not None)
    if problems:
        raise UsageError(problems)
    workers = None if config.data.workers == "auto" else config.data.workers
    backend: Backend = ("nccl" if gpus else "gloo") if config.device.backend == "auto" else config.device.backend
    if config.device.parallel == "dp":
        devices, parents = tuple(gpu.uuid for gpu in gpus), tuple(gpu.parent for gpu in gpus)
        return Plan(devices, parents, 1, cores(), workers, backend, devices_a_rank=len(gpus))
    if gpus:
        ranks = local_ranks or len(gpus)
        if 1 < len(gpus) < ranks:
            reason = f"{ranks} ranks on this host need a GPU each, and there are {len(gpus)}"
            raise UsageError.one("device.gpus", reason, "start fewer")
        devices = tuple(gpu.uuid for gpu in gpus[:ranks])
        parents = tuple(gpu.parent for gpu in gpus[:ranks])
        return Plan(devices, parents, ranks, max(1, cores() // ranks), workers, backend)
    ranks = local_ranks or config.device.ranks
    most = RANKS_PER_CORE * cores()
    if ranks > most:
        reason = f"{ranks} ranks are too many for {cores()} cores"
        raise UsageError.one("device.ranks", reason, f"give {most} or fewer (4 a core)")
    return Plan(("cpu",) * ranks, (None,) * ranks, ranks, max(1, cores() // ranks), workers, backend)


def _problems(config: Config, gpus: Sequence[Device], *, launched: bool) -> list[Problem]:
    """What the devices that there are make impossible."""
    device, problems = config.device, []
    if device.backend == "nccl" and not gpus:
        problems.append(Problem("device.backend", "nccl joins GPUs, and this run is on the CPU", "give gloo or auto"))
    if device.parallel == "dp":
        if launched:
            reason = "dp is one process for all GPUs, and torchrun and srun start one for each"
            problems.append(Problem("device.parallel", reason, "start gputrain without them, or take ddp"))
        elif len(gpus) < 2:
            what = "one GPU" if gpus else "the CPU"
            reason = f"dp divides each batch among several GPUs, and this run is on {what}"
            problems.append(Problem("device.parallel", reason, "give more with --gpus, or take ddp"))
    return problems


def prepare_environment(plan: Plan, environ: MutableMapping[str, str]) -> None:
    """Set what ranks must find in their environment before they look for GPUs, and what they start."""
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(plan.devices) if plan.on_gpu else ""
    environ.setdefault("OMP_NUM_THREADS", str(plan.threads))
