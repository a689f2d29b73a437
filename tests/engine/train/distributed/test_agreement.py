"""Agreement: how often ranks exchange control requests, and how soon all ranks receive one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from engine.runs.control import RequestCounters
from engine.train.distributed import agreement as agreement_module
from engine.train.distributed.agreement import MAX_POLL_INTERVAL_STEPS, POLL_INTERVAL_SECONDS, Agreement


@pytest.fixture
def agreement() -> Iterator[Agreement]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Agreement(dist.group.WORLD)
    dist.destroy_process_group()


class Clock:
    """The clock that `engine.train.distributed.agreement` reads."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(agreement_module, "time", clock)
    return clock


class Rank:
    """A rank with its requests; counts how often they are polled."""

    def __init__(self) -> None:
        self.requests, self.count = RequestCounters(), 0

    def __call__(self) -> RequestCounters:
        self.count += 1
        return self.requests


def test_agreement_polls_less_often_for_fast_steps_and_delivers_stop_within_a_second(
    agreement: Agreement, clock: Clock
) -> None:
    rank, steps = Rank(), 0
    while clock.now_s < 4 * POLL_INTERVAL_SECONDS:
        assert not agreement(rank).stop
        steps += 1
        clock.now_s += 0.001
    assert steps / MAX_POLL_INTERVAL_STEPS <= rank.count < steps / 8
    rank.requests.stop = True
    start_time = clock.now_s
    while not agreement(rank).stop:
        clock.now_s += 0.001
    assert clock.now_s - start_time < 1


def test_agreement_polls_every_step_when_steps_are_long(agreement: Agreement, clock: Clock) -> None:
    rank = Rank()
    for _ in range(3):
        agreement(rank)
        clock.now_s += 1.5 * POLL_INTERVAL_SECONDS
    assert rank.count == 3
    rank.requests.checkpoints = 1
    assert agreement(rank).checkpoints == 0
    assert agreement(rank).checkpoints == 1


def test_agreement_interval_follows_slowest_rank(agreement: Agreement, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals are negated for the MAX all-reduce, so the shortest interval wins."""
    rank, sent = Rank(), list[list[int]]()
    reduce = dist.all_reduce

    def all_reduce_with_slow_rank(numbers, *arguments, **options):  # type: ignore[no-untyped-def]
        sent.append(numbers.tolist())
        numbers[0] = max(int(numbers[0]), -3)
        return reduce(numbers, *arguments, **options)

    monkeypatch.setattr(dist, "all_reduce", all_reduce_with_slow_rank)
    for _ in range(31):
        agreement(rank)
    assert [-numbers[0] for numbers in sent[:4]] == [1, 2, 4, 6]
    assert rank.count == 2 + 1 + 28 // 3
