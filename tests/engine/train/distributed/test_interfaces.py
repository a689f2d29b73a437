"""The network interfaces through which the ranks connect."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from engine.runs.records import RankDevice
from engine.train.distributed.node_plan import NodePlan
from engine.train.distributed.process_group import RankHello, choose_interfaces, describe_rank
from engine.train.distributed.rank_env import RankInfo
from support.messages import raises_problem

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.fixture(params=["127.0.1.1", "192.0.2.7"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address that the name of this host resolves to: as in Debian, or of a network for documentation, RFC 5737."""
    address: str = request.param
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(None, None, None, "", (address, 0))])
    return address


def choose(
    network: str = "", *, reachable: bool = True, environ: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Choose the interfaces of this process and of a rank 1 on another host; "" is the network of this process."""
    own = describe_rank(NodePlan(("cpu",), (None,), 1, 1, 0, "gloo"), RankInfo(0, 2, 0, 1), environ)
    other = RankHello(devices=(RankDevice(1, "gpu07", 2, "cpu"),), network=network or own.network, reachable=reachable)
    return choose_interfaces([own, other], environ)


def test_ranks_of_one_host_connect_through_loopback() -> None:
    assert choose(reachable=False) == LOOPBACK


def test_interface_of_user_is_kept() -> None:
    assert choose(environ={"NCCL_SOCKET_IFNAME": "eth0"}) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_host_whose_name_resolves_to_loopback_is_refused_with_variable_to_set(address: str) -> None:
    if address == "192.0.2.7":
        assert choose("other") == {}
        return
    with raises_problem("connection-failed", "device.launcher", socket.gethostname(), "GLOO_SOCKET_IFNAME"):
        choose("other")
    assert choose("other", environ={"GLOO_SOCKET_IFNAME": "eth7"}) == {}


@pytest.mark.parametrize("address", ["192.0.2.7"], indirect=True)
def test_refused_host_is_named_on_all_ranks(address: str) -> None:
    with raises_problem("connection-failed", "device.launcher", "gpu07"):
        choose("other", reachable=False)
