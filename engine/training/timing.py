"""Measure the time that a rank waits for data and spends in forward passes.

Neither contains a collective, so a straggler stands out in them; in the backward pass all ranks wait for it.

On a GPU both are measured with CUDA events, which are read once they have completed, without a host sync. The data wait
is then the time in which the device is idle for lack of a batch or prepares one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engine.distributed.collectives import gather
from engine.runs.records import RankEpochTiming
from engine.training.step_marks import StepMarks
from engine.utils.codec import UNSET, UnsetType


class EpochClock:
    """Elapsed time of an epoch without the time in which it was stopped.

    `restart_step_clock` restarts the clock of the throughput, see `RankState.restart_step_clock`.
    """

    def __init__(self, restart_step_clock: Callable[[], None]) -> None:
        self._restart_step_clock = restart_step_clock
        self.start()

    def start(self) -> None:
        """Start at zero."""
        self._start, self._stopped_seconds = time.perf_counter(), 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self._start - self._stopped_seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the time from the duration of the epoch and from the throughput of its steps."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stopped_seconds += time.perf_counter() - start
        self._restart_step_clock()


class PhaseTimer:
    """Timer of one rank. Call `start_data_wait`, `end_data_wait` and `end_forward` for each batch, in this order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: StepMarks | None = None
        """Marks the timed phases in the trace; None unless steps are profiled."""
        self._event_pool: list[torch.cuda.Event] = []
        self._in_flight: deque[list[torch.cuda.Event]] = deque()
        self.start_epoch()

    def start_epoch(self) -> None:
        """Reset the sums."""
        self._data_wait_seconds = self._forward_seconds = 0.0
        self._wait_started = self._forward_started = 0.0
        self._batch_events: list[torch.cuda.Event] = []

    def start_data_wait(self) -> None:
        if self.marks is not None:
            self.marks.begin("data")
        self._wait_started = time.perf_counter()
        if self._device.type == "cuda":
            self._batch_events = []
            self._record_event()

    def end_data_wait(self) -> float:
        """Return the seconds for which the host waited for the batch."""
        self._forward_started = time.perf_counter()
        seconds = self._forward_started - self._wait_started
        if self._device.type == "cuda":
            self._record_event()
        else:
            self._data_wait_seconds += seconds
        if self.marks is not None:
            self.marks.begin("forward")
        return seconds

    def end_forward(self) -> None:
        """Call after the forward pass and the loss."""
        if self._device.type == "cuda":
            self._record_event()
            self._in_flight.append(self._batch_events)
            # Reading one per batch bounds the events in flight by how far the host is ahead of the device.
            if self._in_flight[0][-1].query():
                self._consume_oldest()
        else:
            self._forward_seconds += time.perf_counter() - self._forward_started
        if self.marks is not None:
            self.marks.begin("backward")

    def _record_event(self) -> None:
        event = self._event_pool.pop() if self._event_pool else torch.cuda.Event(enable_timing=True)
        event.record()
        self._batch_events.append(event)

    def _consume_oldest(self) -> None:
        wait_start, forward_start, forward_end = events = self._in_flight.popleft()
        self._data_wait_seconds += wait_start.elapsed_time(forward_start) / 1000
        self._forward_seconds += forward_start.elapsed_time(forward_end) / 1000
        self._event_pool += events

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of data wait and of forward passes since `start_epoch`. A host sync."""
        if self._in_flight:
            self._in_flight[-1][-1].synchronize()
        while self._in_flight:
            self._consume_oldest()
        return self._data_wait_seconds, self._forward_seconds


def gather_timings(timer: PhaseTimer, train_seconds: float, cpu_group: dist.ProcessGroup) -> list[RankEpochTiming]:
    """Return the timings of all ranks on rank 0, nothing on other ranks. A collective.

    `train_seconds` is this rank's duration of the epoch's training part.
    """
    local = torch.tensor([train_seconds, *timer.seconds()], dtype=torch.float64)
    ranks = enumerate(gather(local, cpu_group))
    return [RankEpochTiming(rank, *(round(t, 4) for t in times.tolist())) for rank, times in ranks]


def data_wait_share(timings: Sequence[RankEpochTiming]) -> float | UnsetType:
    """Return the share of the training time spent waiting for data, averaged over ranks; UNSET without training."""
    seconds = sum(timing.seconds for timing in timings)
    if seconds <= 0:
        return UNSET
    return round(min(sum(timing.data_wait_seconds for timing in timings) / seconds, 1.0), 4)
