"""Choose the network interfaces through which NCCL and Gloo connect the ranks.

On one host that is loopback. Between hosts, Gloo listens on the address that the host's own name resolves to. Debian
resolves it to 127.0.1.1, which other hosts cannot reach, so each host takes the interface that leads to the others.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.distributed.messages import receive, send
from engine.distributed.rank_env import RankInfo
from engine.distributed.rendezvous import get_from_rank
from engine.utils.codec import Record
from engine.utils.errors import UsageError
from engine.utils.process import boot_id

if TYPE_CHECKING:
    from torch.distributed import Store

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# NCCL takes a name without "=" for the beginning of names.
LOOPBACK = {GLOO_VARIABLE: "lo", NCCL_VARIABLE: "=lo"}
DISCARD_PORT = 9  # connect(2) of a UDP socket sends nothing; it only looks up the route


class RankAddress(Record, frozen=True, kw_only=True):
    """The network of a rank, and its address on the route to rank 0, "" if rank 0 is unreachable."""

    network: str
    address: str


def loopback_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make ranks of one host connect through loopback, without those that are set already."""
    return {name: interface for name, interface in LOOPBACK.items() if not environ.get(name)}


def choose_interfaces(rank_info: RankInfo, store: Store, host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that select the interfaces of this rank, without those that are set already.

    `host` is the host of rank 0 in the rendezvous, "" if it is unknown. A collective on the store. Raises UsageError if
    no interface leads to the other hosts.
    """
    mine = RankAddress(network=_network_id(), address=_address_towards(host))
    send(store, f"network/{rank_info.rank}", mine)
    ranks = [receive(store, rank, f"network/{rank}", RankAddress) for rank in range(rank_info.world_size)]
    others = [rank.address for rank in ranks if rank.network != mine.network]
    if not others:
        return loopback_variables(environ)
    found = _gloo_interface([mine.address, *others], environ)
    # All ranks refuse together: the others would wait for the refused one.
    store.set(f"unconnected/{rank_info.rank}", socket.gethostname() if found is None else "")
    for rank in range(rank_info.world_size):
        if name := get_from_rank(store, rank, f"unconnected/{rank}").decode():
            raise UsageError.one(
                "device.launcher",
                f"the host name {name} resolves to loopback there, and no interface of it leads to the other hosts",
                f"set {GLOO_VARIABLE} on that host to the interface that connects them",
                code="connection-failed",
            )
    return {GLOO_VARIABLE: found} if found else {}


def _gloo_interface(addresses: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the interface for Gloo, "" for its own choice, or None if no interface leads to other hosts.

    `addresses` are this host's address on the route to rank 0, and those of other hosts.
    """
    if environ.get(GLOO_VARIABLE) or _is_reachable(_address_of(socket.gethostname())):
        return ""
    # The host of rank 0 reaches its own address through loopback, so it takes its route to another host.
    own, *others = addresses
    return next((found for address in [own, *map(_address_towards, others)] if (found := _interface_of(address))), None)


def _network_id() -> str:
    """Return what processes share that reach each other through loopback: the kernel and the network namespace."""
    try:
        namespace = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        namespace = ""
    return f"{boot_id() or socket.gethostname()} {namespace}"


def _address_of(host: str) -> str:
    """Return the first address that a name resolves to, or "" if there is none."""
    with suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    return ""


def _address_towards(host: str) -> str:
    """Return the address of this host from which packets to another one leave, or "" if it is unreachable."""
    with suppress(OSError, UnicodeError, IndexError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
        if host:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def _is_reachable(address: str) -> bool:
    """Whether other hosts may reach an address."""
    try:
        return not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _interface_of(address: str) -> str | None:
    """Return the interface that has an address, or None for loopback and unknown addresses."""
    if not _is_reachable(address):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in addresses):
            return name
    return None
