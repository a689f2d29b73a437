"""Which rank the journal names if a rank of torchrun or srun hangs or fails."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from engine.distributed.rank_env import RankInfo
from engine.distributed.watchdog import Heartbeat, Phase
from engine.launch import external_failures
from engine.launch.external_failures import (
    StalledRank,
    find_root_cause,
    publish_failure,
    share_stall,
    stall_failure,
)
from engine.runs.events import RankFailed

WAITS = StalledRank(Heartbeat(11, 2, Phase.BACKWARD), "GPU-0")
HANGS = StalledRank(Heartbeat(11, 0, Phase.DATA), "GPU-1")


def report(store: HashStore, rank: int, stalled: StalledRank, delay_s: float = 0.0) -> RankFailed:
    time.sleep(delay_s)
    rank_info = RankInfo(rank, 2, rank, 2)
    return stall_failure(share_stall(stalled, rank_info, store), rank_info, 600.0)


@pytest.mark.parametrize("delays_s", [(0.0, 0.2), (0.2, 0.0)], ids=["waiting rank first", "hung rank first"])
def test_all_ranks_report_the_rank_that_lags(delays_s: tuple[float, float]) -> None:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        reports = [pool.submit(report, store, rank, (WAITS, HANGS)[rank], delays_s[rank]) for rank in range(2)]
        failures = [future.result(timeout=20) for future in reports]
    assert [(failure.rank, failure.device) for failure in failures] == [(1, "GPU-1"), (1, "GPU-1")]
    assert failures[0].cause == (
        "no progress for 600 s (run.watchdog); the other ranks wait for rank 1; this rank completed 11 steps and is "
        "waiting for data; its traceback is on stderr"
    )


def test_rank_reports_itself_if_no_other_rank_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_failures, "COMPARE_SECONDS", 0.1)
    failure = report(HashStore(), 0, WAITS)
    assert failure.rank == 0
    assert "wait for" not in failure.cause


def test_rank_reports_itself_if_all_ranks_are_equal() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        reports = [pool.submit(report, store, rank, WAITS) for rank in range(2)]
        assert [future.result(timeout=20).rank for future in reports] == [0, 1]


LOST = RankFailed(rank=0, device="cpu", cause="it lost the connection to another rank", lost_peer=True)


def test_rank_0_reports_failure_that_another_rank_publishes() -> None:
    store = HashStore()
    publish_failure(RankFailed(rank=1, device="cpu", cause="it lost the connection", lost_peer=True), store)
    own_failure = RankFailed(rank=2, device="cpu", cause="ValueError: bad", traceback="Traceback\n  line", time=7.0)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(find_root_cause, LOST, 4, store)
        publish_failure(own_failure, store)
        assert found.result(timeout=20) == own_failure


def test_rank_0_reports_its_own_failure_without_waiting() -> None:
    own_failure = RankFailed(rank=0, device="cpu", cause="ValueError: bad")
    started = time.monotonic()
    assert find_root_cause(own_failure, 2, HashStore()) == own_failure
    assert time.monotonic() - started < external_failures.COMPARE_SECONDS


def test_rank_0_reports_lost_connection_if_no_other_rank_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_failures, "COMPARE_SECONDS", 0.1)
    assert find_root_cause(LOST, 2, HashStore()) == LOST
