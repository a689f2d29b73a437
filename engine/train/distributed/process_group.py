"""Connect the ranks: exchange their devices, choose network interfaces, and create NCCL's and Gloo's process groups.

`engine.train.loop.trainer` calls `join_process_group` once per rank; `rendezvous` has opened the store before.

The interfaces are loopback on one host. Between hosts NCCL and Gloo choose themselves: Gloo listens on the address that
the host's own name resolves to. Debian resolves it to 127.0.1.1, which other hosts cannot reach, so such a host needs
GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from engine.base.codec import Record
from engine.base.errors import UsageError
from engine.base.process import boot_id, discarded_stdout
from engine.config.schema import Config
from engine.runs.records import RankDevice
from engine.train.distributed.messages import exchange
from engine.train.distributed.node_plan import Backend, NodePlan
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.watchdog import collective_timeout_s

NCCL_HEARTBEAT_TIMEOUT_SECONDS = 480  # torch's default
# torch converts the variable to milliseconds in 32 bits, which overflow at 2,147,484 s.
MAX_NCCL_HEARTBEAT_TIMEOUT_SECONDS = 2_000_000
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# NCCL takes a name without "=" for the beginning of names.
LOOPBACK = {GLOO_VARIABLE: "lo", NCCL_VARIABLE: "=lo"}


def join_process_group(
    config: Config, plan: NodePlan, device: torch.device, rank_info: RankInfo, store: Store
) -> tuple[dist.ProcessGroup, list[RankDevice]]:
    """Initialize torch.distributed; return a Gloo group for tensors in host memory, and the device of each rank.

    `device` is the device of this rank. A collective. Raises UsageError if two ranks share a GPU, if no network
    interface connects the hosts, or if this version of torch lacks the backend.
    """
    timeout_s = collective_timeout_s(config.device.timeout, config.run.watchdog)
    # The watchdog ignores the setup, so `device.timeout` alone limits how long ranks wait for each other here.
    ranks = exchange(store, rank_info, "devices", describe_rank(plan, rank_info, os.environ))
    rank_devices = [device for rank in ranks for device in rank.devices]
    check_devices_unique(rank_devices)
    os.environ.update(choose_interfaces(ranks, os.environ))
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


class RankHello(Record, frozen=True, kw_only=True):
    """What a rank tells the others first: its devices, its network, and whether other hosts may reach the interface
    that Gloo takes on its host."""

    devices: tuple[RankDevice, ...]
    network: str
    reachable: bool


def describe_rank(plan: NodePlan, rank_info: RankInfo, environ: Mapping[str, str]) -> RankHello:
    """Return what this rank tells the others."""
    host, pid = socket.gethostname(), os.getpid()
    devices = tuple(
        RankDevice(rank_info.rank, host, pid, plan.devices[index], *(plan.gpus[index] if plan.gpus else ()))
        for index in plan.device_indices(rank_info.local_rank)
    )
    reachable = bool(environ.get(GLOO_VARIABLE)) or _is_reachable(host)
    return RankHello(devices=devices, network=_network_id(), reachable=reachable)


def check_devices_unique(rank_devices: Sequence[RankDevice]) -> None:
    """Raise UsageError if two ranks use the same GPU, on which NCCL fails with a less helpful error of its own."""
    first_rank: dict[tuple[str, str], int] = {}
    for record in rank_devices:
        first = first_rank.setdefault((record.host, record.device), record.rank)
        if record.device != "cpu" and first != record.rank:
            raise UsageError.one(
                "device.gpus",
                f"ranks {first} and {record.rank} on {record.host} both use {record.device}; "
                "start at most one rank per GPU",
                code="gpu-in-use",
            )


def choose_interfaces(ranks: Sequence[RankHello], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that select the interfaces of a rank, without those that are set already.

    Raises UsageError, on all ranks, if the ranks are on several hosts, and others cannot reach one of them.
    """
    if len({rank.network for rank in ranks}) == 1:
        return {name: interface for name, interface in LOOPBACK.items() if not environ.get(name)}
    for rank in ranks:
        if not rank.reachable:
            raise UsageError.one(
                "device.launcher",
                f"the host name {rank.devices[0].host} resolves to loopback there, which other hosts cannot reach",
                f"set {GLOO_VARIABLE} on that host to the interface that connects them",
                code="connection-failed",
            )
    return {}


def _network_id() -> str:
    """Identify the network of this process: its kernel and its network namespace. Equal ones share the loopback."""
    try:
        namespace = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        namespace = ""
    return f"{boot_id() or socket.gethostname()} {namespace}"


def _is_reachable(host: str) -> bool:
    """Whether other hosts may reach the first address that a name resolves to."""
    with suppress(OSError, UnicodeError, ValueError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
        return not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False
