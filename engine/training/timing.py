"""What a rank spends the training of an epoch on: waiting for data, and its forward passes. These hold no collective,
so a rank that is slow shows in them; in the backward pass the others wait for it.

On a GPU both are times on the device, read when they have long passed, without a wait of the host: what counts as
waiting for data is the time that the device stands still for it, or makes it ready itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engine.runs.records import RankEpochTiming


class Stopwatch:
    """Seconds since it was made, without those in which it was stopped."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._stopped_seconds = 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self._start - self._stopped_seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._stopped_seconds += time.perf_counter() - start


class Work:
    """One rank's. Of each batch `wait`, `arrived` and `forwarded` are called, in this order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []
        self._under_way: deque[list[torch.cuda.Event]] = deque()
        self.begin()

    def begin(self) -> None:
        """An epoch's training begins."""
        self._waited = self._forward = 0.0
        self._asked_at = self._arrived_at = 0.0
        self._marks: list[torch.cuda.Event] = []

    def wait(self) -> None:
        """The next batch is asked for."""
        self._asked_at = time.perf_counter()
        if self._device.type == "cuda":
            self._marks = []
            self._mark()

    def arrived(self) -> float:
        """The batch is there: for how many seconds the host waited for it."""
        self._arrived_at = time.perf_counter()
        seconds = self._arrived_at - self._asked_at
        if self._device.type == "cuda":
            self._mark()
        else:
            self._waited += seconds
        return seconds

    def forwarded(self) -> None:
        """The forward pass of the batch is done, its loss included."""
        if self._device.type == "cuda":
            self._mark()
            self._under_way.append(self._marks)
            # One a step is enough to keep as few under way as the host is ahead of the device.
            if self._under_way[0][-1].query():
                self._take_oldest()
        else:
            self._forward += time.perf_counter() - self._arrived_at

    def _mark(self) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def _take_oldest(self) -> None:
        asked, arrived, forwarded = marks = self._under_way.popleft()
        self._waited += asked.elapsed_time(arrived) / 1000
        self._forward += arrived.elapsed_time(forwarded) / 1000
        self._free += marks

    def seconds(self) -> tuple[float, float]:
        """Waited for data and spent in forward passes since `begin`. A wait for the device."""
        if self._under_way:
            self._under_way[-1][-1].synchronize()
        while self._under_way:
            self._take_oldest()
        return self._waited, self._forward


def gather_work(work: Work, trained: float, hosts: dist.ProcessGroup) -> list[RankEpochTiming]:
    """The timings of all ranks, of which this one trained for `trained` seconds; on rank 0, nothing elsewhere. A
    collective on `hosts`, a group for what lies in host memory."""
    mine = torch.tensor([trained, *work.seconds()], dtype=torch.float64)
    lead = dist.get_rank(hosts) == 0
    ranks = [torch.zeros_like(mine) for _ in range(dist.get_world_size(hosts))] if lead else None
    dist.gather(mine, ranks, group=hosts)
    return [RankEpochTiming(rank, *(round(value, 4) for value in one.tolist())) for rank, one in enumerate(ranks or [])]


def share_waited(timings: Sequence[RankEpochTiming]) -> float:
    """Of the training time, mean over the ranks; NaN where nothing was trained."""
    trained = sum(one.seconds for one in timings)
    return round(min(sum(one.waited for one in timings) / trained, 1.0), 4) if trained > 0 else float("nan")
