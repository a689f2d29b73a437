"""What of this machine a run gets: its devices, and each rank's threads and loader processes."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.config.schema import Config
from engine.gpus.selection import CudaDevice
from engine.utils.errors import Problem, UsageError
from engine.utils.host import MAX_RANKS_PER_CORE, available_cores

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class NodePlan:
    """The share of each of the `local_world_size` on this host. `devices` holds the UUID of a GPU or a MIG instance for
    each of them, or of the one that this rank sees, or "cpu"; of all GPUs where one rank has `devices_per_rank` of
    them; `parent_uuids` the UUID of the GPU that an instance is of. `workers` are the loader processes a rank where the
    config names a number, None where the data decides."""

    devices: tuple[str, ...]
    parent_uuids: tuple[str | None, ...]
    local_world_size: int
    threads_per_rank: int
    workers: int | None
    backend: Backend
    devices_per_rank: int = 1

    def device_index(self, local_rank: int) -> int:
        """Which of `devices` a rank has, the first where it has several; CUDA counts them in this order."""
        return local_rank if len(self.devices) > 1 else 0

    def device_indices(self, local_rank: int) -> range:
        """All of `devices` that a rank has."""
        first = self.device_index(local_rank)
        return range(first, first + self.devices_per_rank)

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"


def plan_node(config: Config, gpus: Sequence[CudaDevice], local_world_size: int | None = None) -> NodePlan:
    """`gpus` are those that the run has to itself, none for the CPU; `local_world_size` is given where a launcher has
    already decided how many ranks this host has: it may show each of them one GPU only. Raises UsageError."""
    problems = _plan_problems(config, gpus, external_launcher=local_world_size is not None)
    if problems:
        raise UsageError(problems)
    workers = None if config.data.workers == "auto" else config.data.workers
    backend: Backend = ("nccl" if gpus else "gloo") if config.device.backend == "auto" else config.device.backend
    if config.device.parallel == "dp":
        devices, parents = tuple(gpu.uuid for gpu in gpus), tuple(gpu.parent_uuid for gpu in gpus)
        return NodePlan(devices, parents, 1, available_cores(), workers, backend, devices_per_rank=len(gpus))
    if gpus:
        ranks = local_world_size or len(gpus)
        if 1 < len(gpus) < ranks:
            reason = f"{ranks} ranks on this host need a GPU each, and there are {len(gpus)}"
            raise UsageError.one("device.gpus", reason, "start fewer")
        devices = tuple(gpu.uuid for gpu in gpus[:ranks])
        parents = tuple(gpu.parent_uuid for gpu in gpus[:ranks])
        return NodePlan(devices, parents, ranks, max(1, available_cores() // ranks), workers, backend)
    ranks = local_world_size or config.device.ranks
    most = MAX_RANKS_PER_CORE * available_cores()
    if ranks > most:
        reason = f"{ranks} ranks are too many for {available_cores()} cores"
        raise UsageError.one("device.ranks", reason, f"give {most} or fewer (4 a core)")
    return NodePlan(("cpu",) * ranks, (None,) * ranks, ranks, max(1, available_cores() // ranks), workers, backend)


def _plan_problems(config: Config, gpus: Sequence[CudaDevice], *, external_launcher: bool) -> list[Problem]:
    """What the devices that there are make impossible."""
    device, problems = config.device, []
    if device.backend == "nccl" and not gpus:
        problems.append(Problem("device.backend", "nccl joins GPUs, and this run is on the CPU", "give gloo or auto"))
    if device.parallel == "dp":
        if external_launcher:
            reason = "dp is one process for all GPUs, and torchrun and srun start one for each"
            problems.append(Problem("device.parallel", reason, "start gputrain without them, or take ddp"))
        elif len(gpus) < 2:
            what = "one GPU" if gpus else "the CPU"
            reason = f"dp divides each batch among several GPUs, and this run is on {what}"
            problems.append(Problem("device.parallel", reason, "give more with --gpus, or take ddp"))
    return problems


def prepare_environment(plan: NodePlan, environ: MutableMapping[str, str]) -> None:
    """Set what ranks must find in their environment before they look for GPUs, and what they start."""
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(plan.devices) if plan.on_gpu else ""
    environ.setdefault("OMP_NUM_THREADS", str(plan.threads_per_rank))
