"""The network interfaces through which the ranks connect."""

from __future__ import annotations

import json
import socket

import pytest
import torch.distributed as dist

from engine.train.distributed import process_group
from engine.train.distributed.process_group import choose_interfaces
from engine.train.distributed.rank_env import RankInfo
from support.messages import raises_problem

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
RANK_0 = RankInfo(0, 2, 0, 1)


@pytest.fixture(params=["127.0.1.1", "192.0.2.7"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address that the name of this host resolves to: as in Debian, or of a network for documentation, RFC 5737."""
    address: str = request.param
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(None, None, None, "", (address, 0))])
    return address


def store_with(network: str | None, *, reachable: bool = True) -> dist.HashStore:
    """Return a store in which rank 1 has published its network; None is the network of this process."""
    store = dist.HashStore()
    network = process_group._network_id() if network is None else network
    store.set("network/1", json.dumps({"network": network, "host": "gpu07", "reachable": reachable}))
    return store


def test_ranks_of_one_host_connect_through_loopback() -> None:
    assert choose_interfaces(RankInfo(0, 1, 0, 1), dist.HashStore(), {}) == LOOPBACK
    assert choose_interfaces(RANK_0, store_with(None, reachable=False), {}) == LOOPBACK


def test_interface_of_user_is_kept() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "eth0"}
    assert choose_interfaces(RankInfo(0, 1, 0, 1), dist.HashStore(), environ) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_host_whose_name_resolves_to_loopback_is_refused_with_variable_to_set(address: str) -> None:
    if address == "192.0.2.7":
        assert choose_interfaces(RANK_0, store_with("other"), {}) == {}
        return
    with raises_problem("connection-failed", "device.launcher", socket.gethostname(), "GLOO_SOCKET_IFNAME"):
        choose_interfaces(RANK_0, store_with("other"), {})
    assert choose_interfaces(RANK_0, store_with("other"), {"GLOO_SOCKET_IFNAME": "eth7"}) == {}


@pytest.mark.parametrize("address", ["192.0.2.7"], indirect=True)
def test_refused_host_is_named_on_all_ranks(address: str) -> None:
    with raises_problem("connection-failed", "device.launcher", "gpu07"):
        choose_interfaces(RANK_0, store_with("other", reachable=False), {})
