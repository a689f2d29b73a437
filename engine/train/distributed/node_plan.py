"""Plan the ranks of one node: devices, threads, DataLoader workers and backend.

`engine.jobs.launch` plans each node before the ranks start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.base.codec import Count
from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.host import MAX_RANKS_PER_CORE, available_cores
from engine.config.precision import Capability
from engine.config.schema import Config
from engine.gpus.selection import CudaDevice
from engine.gpus.visible_devices import show_devices
from engine.train.distributed.rank_env import slurm_local_world_size

Backend = Literal["nccl", "nccl-legacy", "nccl2", "gloo"]
MAX_COMPILE_THREADS = 32  # Inductor's own limit


@dataclass(frozen=True)
class NodePlan:
    """Devices and CPU threads of the ranks of one node."""

    devices: tuple[str, ...]
    """UUID of a GPU or MIG instance for each local rank, or "cpu". One entry if a launcher shows this rank one GPU
    only, all GPUs of the rank with DataParallel."""
    parent_uuids: tuple[str | None, ...]
    """UUID of the physical GPU for each MIG instance in `devices`, else None."""
    local_world_size: Count
    """Number of ranks on this node."""
    threads_per_rank: Count
    """CPU threads per rank (OMP_NUM_THREADS), and compile processes of Inductor."""
    workers: Count | None
    """DataLoader workers per rank; None for `data.workers: auto`."""
    backend: Backend
    """Backend of the process group. `process_group` maps it to the name in the installed torch."""
    devices_per_rank: Count = 1
    """GPUs per rank; more than one with DataParallel."""
    gpus: tuple[tuple[str, Count], ...] = ()
    """Product name and index in PCI bus order of each GPU in `devices`; empty on the CPU."""
    cores_per_rank: Count = 1
    """CPU cores that a rank may use for its threads and loader processes."""
    capability: Capability | None = None
    """Lowest compute capability of the GPUs of all nodes; None on the CPU."""

    def device_index(self, local_rank: int) -> int:
        """Return the CUDA index of a rank's first device, which is its index in `devices`."""
        return local_rank if len(self.devices) > 1 else 0

    def device_indices(self, local_rank: int) -> range:
        """Return the CUDA indices of all devices of a rank."""
        first = self.device_index(local_rank)
        return range(first, first + self.devices_per_rank)

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"

    @property
    def uses_nccl(self) -> bool:
        """Whether the process group has a communicator of NCCL."""
        return self.backend != "gloo"


def plan_node(
    config: Config,
    gpus: Sequence[CudaDevice],
    local_world_size: int | None = None,
    world_size: int | None = None,
) -> NodePlan:
    """Return the plan of this node. `gpus` are the GPUs reserved for the run, none for training on the CPU.

    An external launcher sets the two sizes, and may show each rank one GPU only. Raises UsageError if the config does
    not fit the devices.
    """
    problems = _plan_problems(config, gpus, external_launcher=local_world_size is not None)
    raise_if_any(problems)
    workers = None if config.data.workers == "auto" else config.data.workers
    own_cores = local_world_size is not None and _ranks_own_cores(local_world_size, os.environ)

    def plan(ranks: int, backend: Backend, gpus: Sequence[CudaDevice] = ()) -> NodePlan:
        is_dp = config.device.parallel == "dp"
        cores = max(1, available_cores() // (1 if own_cores else ranks))
        return NodePlan(
            devices=tuple(gpu.uuid for gpu in gpus) or ("cpu",) * ranks,
            parent_uuids=tuple(gpu.parent_uuid for gpu in gpus) or (None,) * ranks,
            local_world_size=ranks,
            threads_per_rank=config.device.threads or cores,
            workers=workers,
            backend=backend,
            devices_per_rank=len(gpus) if is_dp else 1,
            gpus=tuple((gpu.name, gpu.index) for gpu in gpus),
            cores_per_rank=cores,
            capability=lowest_capability([gpu.capability for gpu in gpus]),
        )

    if config.device.parallel == "dp":
        return plan(1, _backend(config, 1), gpus)
    if gpus:
        ranks = local_world_size or len(gpus)
        if 1 < len(gpus) < ranks:
            reason = f"{ranks} ranks on this host need one GPU each, but only {len(gpus)} are available"
            raise UsageError.one("device.gpus", reason, "start fewer ranks on this host", code="too-few-gpus")
        return plan(ranks, _backend(config, world_size or ranks), gpus[:ranks])
    ranks = local_world_size or config.device.ranks
    max_ranks = MAX_RANKS_PER_CORE * available_cores()
    if ranks > max_ranks:
        reason = f"{ranks} ranks are too many for {available_cores()} cores"
        raise UsageError.one("device.ranks", reason, f"use at most {max_ranks} (4 per core)", code="too-many")
    return plan(ranks, "gloo")


def _ranks_own_cores(ranks: int, environ: Mapping[str, str]) -> bool:
    """Whether this process has cores that no other rank uses: srun gives them to each task with --cpus-per-task."""
    cpus = environ.get("SLURM_CPUS_PER_TASK", "")
    is_slurm_task = cpus.isdecimal() and slurm_local_world_size(environ, 0) == ranks
    return is_slurm_task and available_cores() <= int(cpus)


def lowest_capability(capabilities: Sequence[Capability | None]) -> Capability | None:
    """Return the lowest of some compute capabilities, None if one is unknown."""
    known = [capability for capability in capabilities if capability is not None]
    return min(known) if known and len(known) == len(capabilities) else None


def _backend(config: Config, world_size: int) -> Backend:
    """Return the backend of ranks on GPUs. A single rank has no collectives on its GPU, so it needs no NCCL."""
    if config.device.backend != "auto":
        return config.device.backend
    return gpu_backend(os.environ) if world_size > 1 else "gloo"


def gpu_backend(environ: Mapping[str, str]) -> Backend:
    """Return the backend of several ranks on GPUs.

    In torch 2.15, `getFuture()` of nccl2's work makes the current stream wait for the collective. DDP calls it as it
    launches each bucket, so nothing would overlap (pytorch#192281). A user who sets torch's own variable has chosen.
    """
    return "nccl" if environ.get("TORCH_DIST_USE_NCCL2") else "nccl-legacy"


def _plan_problems(config: Config, gpus: Sequence[CudaDevice], *, external_launcher: bool) -> list[Problem]:
    """Return the settings that are impossible with these devices."""
    device, problems = config.device, []
    if device.backend not in ("auto", "gloo") and not gpus:
        reason = f"{device.backend} needs GPUs, but this run is on the CPU"
        problems.append(Problem("device.backend", reason, "use gloo or auto", code="no-gpu"))
    if device.parallel == "dp":
        if external_launcher:
            reason = "dp uses one process for all GPUs, but torchrun and srun start one per GPU"
            problems.append(
                Problem("device.parallel", reason, "start gputrain without them, or use ddp", code="conflict")
            )
        elif len(gpus) < 2:
            available = "one GPU" if gpus else "the CPU"
            reason = f"dp splits each batch across several GPUs, but this run is on {available}"
            problems.append(
                Problem("device.parallel", reason, "request more GPUs with --gpus, or use ddp", code="too-few-gpus")
            )
    return problems


def prepare_environment(plan: NodePlan, environ: MutableMapping[str, str]) -> None:
    """Set the environment variables that ranks and their children need before CUDA is initialized."""
    show_devices(plan.devices if plan.on_gpu else (), environ)
    environ.setdefault("OMP_NUM_THREADS", str(plan.threads_per_rank))
    # By default each rank would start as many compile processes as the host has cores.
    environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(plan.threads_per_rank, MAX_COMPILE_THREADS)))
