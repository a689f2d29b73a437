"""Which rank the journal names if a rank of torchrun or srun hangs or fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store, TCPStore

from engine.distributed.rank_env import RankInfo
from engine.distributed.watchdog import Heartbeat, Heartbeats, Phase, Watchdog
from engine.launch import node as external_failures
from engine.launch.node import (
    StalledRank,
    find_root_cause,
    publish_failure,
    share_stall,
    stall_failure,
    watchdog_thread,
)
from engine.runs.events import RankFailed
from engine.utils.process import die_with_parent

WAITS = Heartbeat(11, 2, Phase.BACKWARD)
HANGS = Heartbeat(11, 0, Phase.DATA)


@pytest.fixture
def store() -> Store:
    """A store in which three ranks have published their devices."""
    store = HashStore()
    for rank in range(3):
        watchdog_thread(Watchdog(Heartbeats(1), 600.0), RankInfo(rank, 3, rank, 3), f"GPU-{rank}", store, None)
    return store


@pytest.fixture
def hung_store() -> Iterator[Store]:
    """The store of another process, which is stopped."""
    receiver, sender = os.pipe()
    parent, host = os.getpid(), os.fork()
    if host == 0:
        try:
            die_with_parent(parent)
            server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(sender, str(server.port).encode())
            signal.pause()
        finally:
            os._exit(1)
    store = TCPStore("127.0.0.1", int(os.read(receiver, 8)), is_master=False)
    os.kill(host, signal.SIGSTOP)
    yield store
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    os.close(receiver)
    os.close(sender)


def report(
    store: Store,
    rank: int,
    heartbeat: Heartbeat,
    delay_s: float = 0.0,
    world_size: int = 2,
) -> RankFailed:
    time.sleep(delay_s)
    rank_info = RankInfo(rank, world_size, rank, world_size)
    stalled = share_stall(StalledRank(f"GPU-{rank}", heartbeat), rank_info, store)
    return stall_failure(stalled, rank_info, 600.0)


@pytest.mark.parametrize("delays_s", [(0.0, 0.2), (0.2, 0.0)], ids=["waiting rank first", "hung rank first"])
def test_all_ranks_report_the_rank_that_lags(delays_s: tuple[float, float], store: Store) -> None:
    with ThreadPoolExecutor() as pool:
        reports = [pool.submit(report, store, rank, (WAITS, HANGS)[rank], delays_s[rank]) for rank in range(2)]
        failures = [future.result(timeout=20) for future in reports]
    assert [(failure.rank, failure.device) for failure in failures] == [(1, "GPU-1"), (1, "GPU-1")]
    assert failures[0].cause == (
        "no progress for 600 s (run.watchdog); the other ranks wait for rank 1; this rank completed 11 steps and is "
        "waiting for data; its traceback is on stderr"
    )


def test_rank_reports_ranks_that_do_not_respond(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    monkeypatch.setattr(external_failures, "COMPARE_SECONDS", 1.0)
    failure = report(store, 0, WAITS, world_size=3)
    assert (failure.rank, failure.device) == (1, "GPU-1")
    assert failure.cause == (
        "no progress for 600 s (run.watchdog); the other ranks wait for ranks 1, 2; this rank did not respond"
    )


def test_rank_reports_itself_if_store_hangs(monkeypatch: pytest.MonkeyPatch, hung_store: Store) -> None:
    monkeypatch.setattr(external_failures, "COMPARE_SECONDS", 0.2)
    failure = report(hung_store, 0, WAITS)
    assert (failure.rank, failure.device) == (0, "GPU-0")
    assert "wait for" not in failure.cause


def test_rank_reports_itself_if_all_ranks_are_equal(store: Store) -> None:
    with ThreadPoolExecutor() as pool:
        reports = [pool.submit(report, store, rank, WAITS) for rank in range(2)]
        assert [future.result(timeout=20).rank for future in reports] == [0, 1]


LOST = RankFailed(
    rank=0, device="cpu", cause="it lost the connection to another rank", code="connection-failed", lost_peer=True
)


def test_rank_0_reports_failure_that_another_rank_publishes() -> None:
    store = HashStore()
    publish_failure(
        RankFailed(rank=1, device="cpu", cause="it lost the connection", code="connection-failed", lost_peer=True),
        store,
    )
    own_failure = RankFailed(
        rank=2, device="cpu", cause="ValueError: bad", code="rank-failed", traceback="Traceback\n  line", time=7.0
    )
    with ThreadPoolExecutor() as pool:
        found = pool.submit(find_root_cause, LOST, 4, store)
        publish_failure(own_failure, store)
        assert found.result(timeout=20) == own_failure


def test_rank_0_reports_its_own_failure_without_waiting() -> None:
    own_failure = RankFailed(rank=0, device="cpu", cause="ValueError: bad", code="rank-failed")
    started = time.monotonic()
    assert find_root_cause(own_failure, 2, HashStore()) == own_failure
    assert time.monotonic() - started < external_failures.COMPARE_SECONDS


def test_rank_0_reports_lost_connection_if_no_other_rank_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_failures, "COMPARE_SECONDS", 0.1)
    assert find_root_cause(LOST, 2, HashStore()) == LOST
