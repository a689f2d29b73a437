"""The network interfaces through which the ranks connect."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from engine.distributed import interfaces
from engine.distributed.interfaces import choose_interfaces
from engine.distributed.rank_env import RankInfo
from support.messages import raises_problem

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
RANK_0, RANK_1 = RankInfo(0, 2, 0, 1), RankInfo(1, 2, 0, 1)
UNREACHABLE, MINE = "192.0.2.7", "198.51.100.1"  # of the networks for documentation, RFC 5737


@pytest.fixture
def loopback_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the name of this host resolve to 127.0.1.1, as in Debian."""
    resolve = socket.getaddrinfo

    def resolve_like_debian(host: str, *args: object, **options: object) -> object:
        return resolve("127.0.1.1" if host == socket.gethostname() else host, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_like_debian)


@pytest.fixture
def one_ethernet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this host the interface `eth7`, which leads to every address that is not loopback."""
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth7": [SimpleNamespace(address=MINE)]})
    routes = {"": "", UNREACHABLE: MINE}
    monkeypatch.setattr(interfaces, "_address_towards", lambda host: routes.get(host, "127.0.0.1"))


def store_with(rank: int, network: str | None, address: str, unconnected: str = "") -> dist.HashStore:
    """Return a store in which another rank has published its network; None is the network of this process."""
    store = dist.HashStore()
    network = interfaces._network_id() if network is None else network
    store.set(f"network/{rank}", json.dumps({"network": network, "address": address}))
    store.set(f"unconnected/{rank}", unconnected)
    return store


def test_ranks_of_one_host_connect_through_loopback() -> None:
    assert choose_interfaces(RankInfo(0, 1, 0, 1), dist.HashStore(), "", {}) == LOOPBACK
    assert choose_interfaces(RANK_0, store_with(1, None, "127.0.0.1"), "127.0.0.1", {}) == LOOPBACK


def test_interface_of_user_is_kept() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "eth0"}
    assert choose_interfaces(RankInfo(0, 1, 0, 1), dist.HashStore(), "", environ) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_hosts_with_usable_names_keep_choice_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_address_of", lambda _: UNREACHABLE)
    assert choose_interfaces(RANK_0, store_with(1, "other", UNREACHABLE), "127.0.0.1", {}) == {}


@pytest.mark.usefixtures("loopback_name", "one_ethernet")
@pytest.mark.parametrize(
    ("rank_info", "master"),
    [(RANK_1, UNREACHABLE), (RANK_0, socket.gethostname())],
    ids=["other host", "host of rank 0"],
)
def test_name_that_resolves_to_loopback_is_replaced_by_route_to_others(rank_info: RankInfo, master: str) -> None:
    store = store_with(1 - rank_info.rank, "other", UNREACHABLE)
    assert choose_interfaces(rank_info, store, master, {}) == {"GLOO_SOCKET_IFNAME": "eth7"}


@pytest.mark.usefixtures("loopback_name", "one_ethernet")
def test_host_without_route_is_refused_with_variable_to_set() -> None:
    with raises_problem("connection-failed", "device.launcher", "GLOO_SOCKET_IFNAME"):
        choose_interfaces(RANK_0, store_with(1, "other", ""), "127.0.0.1", {})


def test_refused_host_is_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_address_of", lambda _: UNREACHABLE)
    with raises_problem("connection-failed", "device.launcher", "gpu07"):
        choose_interfaces(RANK_0, store_with(1, "other", UNREACHABLE, unconnected="gpu07"), "127.0.0.1", {})
