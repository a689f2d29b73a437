"""The network interfaces through which NCCL and Gloo connect the ranks.

On one host that is loopback. Between hosts both choose themselves: Gloo listens on the address that the host's own name
resolves to. Debian resolves it to 127.0.1.1, which other hosts cannot reach, so such a host needs GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engine.distributed.messages import exchange
from engine.distributed.rank_env import RankInfo
from engine.utils.codec import Record
from engine.utils.errors import UsageError
from engine.utils.process import boot_id

if TYPE_CHECKING:
    from torch.distributed import Store

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# NCCL takes a name without "=" for the beginning of names.
LOOPBACK = {GLOO_VARIABLE: "lo", NCCL_VARIABLE: "=lo"}


class RankNetwork(Record, frozen=True, kw_only=True):
    """The network of a rank, its host, and whether other hosts may reach the interface that Gloo takes there."""

    network: str
    host: str
    reachable: bool


def loopback_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make ranks of one host connect through loopback, without those that are set already."""
    return {name: interface for name, interface in LOOPBACK.items() if not environ.get(name)}


def choose_interfaces(rank_info: RankInfo, store: Store, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that select the interfaces of this rank, without those that are set already.

    A collective on the store. Raises UsageError on all ranks if the ranks are on several hosts, and others cannot reach
    one of them.
    """
    host = socket.gethostname()
    mine = RankNetwork(
        network=_network_id(), host=host, reachable=bool(environ.get(GLOO_VARIABLE)) or _is_reachable(host)
    )
    ranks = exchange(store, rank_info, "network", mine)
    if all(rank.network == mine.network for rank in ranks):
        return loopback_variables(environ)
    for rank in ranks:
        if not rank.reachable:
            raise UsageError.one(
                "device.launcher",
                f"the host name {rank.host} resolves to loopback there, which other hosts cannot reach",
                f"set {GLOO_VARIABLE} on that host to the interface that connects them",
                code="connection-failed",
            )
    return {}


def _network_id() -> str:
    """Return what processes share that reach each other through loopback: the kernel and the network namespace."""
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
