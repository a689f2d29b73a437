"""Connect the ranks: exchange their devices, choose network interfaces, and create NCCL's and Gloo's process groups.

`engine.training.train` calls `join_process_group` once per rank; `rendezvous` has opened the store before.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from engine.config.schema import Config
from engine.distributed.interfaces import choose_interfaces
from engine.distributed.node_plan import Backend, NodePlan
from engine.distributed.rank_env import RankInfo
from engine.distributed.rendezvous import wait_for_ranks
from engine.distributed.topology import check_devices_unique, exchange_rank_devices
from engine.distributed.watchdog import collective_timeout_s
from engine.runs.records import RankDevice
from engine.utils.errors import UsageError
from engine.utils.process import discarded_stdout

NCCL_HEARTBEAT_TIMEOUT_SECONDS = 480  # torch's default
# torch converts the variable to milliseconds in 32 bits, which overflow at 2,147,484 s.
MAX_NCCL_HEARTBEAT_TIMEOUT_SECONDS = 2_000_000


def join_process_group(
    config: Config, plan: NodePlan, device: torch.device, rank_info: RankInfo, store: Store
) -> tuple[dist.ProcessGroup, list[RankDevice]]:
    """Initialize torch.distributed; return a Gloo group for tensors in host memory, and the device of each rank.

    `device` is the device of this rank. A collective. Raises UsageError if two ranks share a GPU, if no network
    interface connects the hosts, or if this version of torch lacks the backend.
    """
    timeout_s = collective_timeout_s(config.device.timeout, config.run.watchdog)
    # The watchdog ignores the setup, so `device.timeout` alone limits how long ranks wait for each other here.
    wait_for_ranks(store, rank_info, config.device.timeout)
    rank_devices = exchange_rank_devices(plan, rank_info, store)
    check_devices_unique(rank_devices)
    os.environ.update(choose_interfaces(rank_info, store, os.environ))
    # Gloo of torch 2.9 prints a line for each group.
    silence = discarded_stdout() if torch.__version__ < "2.11" else nullcontext()
    with silence:
        init_default_group(plan.backend, device, rank_info, store, timeout_s)
        cpu_group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        dist.barrier(group=cpu_group)
    return cpu_group, rank_devices


def init_default_group(
    backend: Backend, device: torch.device, rank_info: RankInfo, store: Store, timeout_s: float
) -> None:
    """Initialize torch.distributed. `device` is the GPU of this rank for NCCL; Gloo ignores it. A collective.

    Raises UsageError if this version of torch lacks the backend.
    """
    # torch dumps these collectives when one of NCCL times out. Off by default in torch 2.9; the older variable is the
    # user's.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    name, options = torch_backend(backend), dict[str, Any]()
    if backend != "gloo":
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(nccl_heartbeat_timeout_s(timeout_s)))
        # Without it, torch guesses the GPU from LOCAL_RANK, which an outer launcher may have set.
        options["device_id"] = device
    dist.init_process_group(
        name,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timedelta(seconds=timeout_s),
        **options,
    )


def torch_backend(backend: Backend) -> str:
    """Return the name of a backend in this version of torch. Raises UsageError if torch lacks it.

    Before 2.15, torch has one NCCL backend, named `nccl`; `nccl-legacy` is its later name.
    """
    if dist.is_backend_available(backend):
        return backend
    if backend == "nccl-legacy":
        return torch_backend("nccl")
    remedy = "use nccl" if backend == "nccl2" and dist.is_nccl_available() else "use gloo, or install torch with NCCL"
    raise UsageError.one(
        "device.backend", f"torch {torch.__version__} has no backend {backend}", remedy, code="not-supported"
    )


def nccl_heartbeat_timeout_s(timeout_s: float) -> int:
    """Return the time after which torch aborts a rank whose NCCL thread is blocked, for the timeout of collectives.

    A healthy rank can be blocked that long in a collective.
    """
    return int(min(max(timeout_s, NCCL_HEARTBEAT_TIMEOUT_SECONDS), MAX_NCCL_HEARTBEAT_TIMEOUT_SECONDS))
