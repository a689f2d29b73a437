"""The store of ranks on one host, and the messages that name a rank that does not arrive."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from engine.train.distributed.messages import HostProblems, exchange
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.rendezvous import (
    RendezvousTimeoutError,
    create_store_file,
    open_local_store,
)
from support.messages import raises_problem

NOBODY = 65534


@pytest.fixture
def store_fd() -> Iterator[int]:
    fd = create_store_file()
    yield fd
    os.close(fd)


def test_local_store_counts_additions_of_all_processes(store_fd: int) -> None:
    children = []
    for _ in range(4):
        children.append(os.fork())
        if children[-1] == 0:
            store = open_local_store(store_fd, timeout_s=20)
            for _ in range(250):
                store.add("counter", 1)
            os._exit(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert open_local_store(store_fd, timeout_s=20).add("counter", 0) == 1000


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_local_store_cannot_be_opened_by_another_user(store_fd: int) -> None:
    path, child = f"/proc/{os.getpid()}/fd/{store_fd}", os.fork()
    if child == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            os.open(path, os.O_RDWR)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("ranks", "names"), [(3, " 1, 2 "), (2, " 1 ")])
def test_exchange_names_ranks_that_do_not_send(store_fd: int, ranks: int, names: str) -> None:
    store = open_local_store(store_fd, timeout_s=1)
    with raises_problem("timed-out", None, names, "comparison", "1 s", "device.timeout", kind=RendezvousTimeoutError):
        exchange(store, RankInfo(0, ranks, 0, ranks), "comparison", HostProblems(host="a", problems=()))
