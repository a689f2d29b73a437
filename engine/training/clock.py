"""The time of one rank: of the epoch, of the steps that no event has reported yet, and of the phases of a step.

The wait for data and the forward pass contain no collective, so a straggler stands out in them; in the backward pass
all ranks wait for it. On a GPU both are measured with CUDA events, which are read once they have completed, without a
host sync. The data wait is then the time in which the device is idle for lack of a batch or prepares one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from engine.distributed.collectives import gather
from engine.runs.profile_file import PARTS, Part
from engine.runs.records import RankEpochTiming
from engine.utils.codec import UNSET, UnsetType

# Begin of the names of the marks in the trace of a profile.
MARK_PREFIX = "gputrain: "


class Clock:
    """Clock of one rank. Call `start_data_wait`, `end_data_wait` and `end_forward` for each batch, in this order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: StepMarks | None = None
        """Marks the phases in the trace; None unless steps are profiled."""
        self._event_pool: list[torch.cuda.Event] = []
        self._in_flight: deque[list[torch.cuda.Event]] = deque()
        self.start_epoch()

    def start_epoch(self) -> None:
        """Reset all times."""
        self._epoch_start, self._stopped_seconds = time.perf_counter(), 0.0
        self._data_wait_seconds = self._forward_seconds = 0.0
        self._wait_started = self._forward_started = 0.0
        self._batch_events: list[torch.cuda.Event] = []
        self.restart_steps()

    def epoch_seconds(self) -> float:
        """Return the duration of the epoch so far, without the time in which the clock was stopped."""
        return time.perf_counter() - self._epoch_start - self._stopped_seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the time from the duration of the epoch and from the throughput of its steps."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stopped_seconds += time.perf_counter() - start
        self.restart_steps()

    def restart_steps(self) -> None:
        """Begin a new group of steps: the time since the last one, such as an evaluation, is not in the throughput."""
        self._steps_start, self._steps, self._steps_wait_seconds = time.perf_counter(), 0, 0.0

    def throughput(self, images_per_step: int) -> tuple[float, float]:
        """Return the images per second of the group of steps, and the share of its time spent waiting for data."""
        seconds = max(time.perf_counter() - self._steps_start, 1e-9)
        wait_share = min(self._steps_wait_seconds / seconds, 1.0)
        return round(self._steps * images_per_step / seconds, 1), round(wait_share, 4)

    def start_data_wait(self) -> None:
        if self.marks is not None:
            self.marks.begin("data")
        self._wait_started = time.perf_counter()
        if self._device.type == "cuda":
            self._batch_events = []
            self._record_event()

    def end_data_wait(self) -> None:
        self._forward_started = time.perf_counter()
        seconds = self._forward_started - self._wait_started
        self._steps_wait_seconds += seconds
        if self._device.type == "cuda":
            self._record_event()
        else:
            self._data_wait_seconds += seconds
        if self.marks is not None:
            self.marks.begin("forward")

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

    def end_step(self) -> None:
        """Count a step of the group."""
        self._steps += 1

    def _record_event(self) -> None:
        event = self._event_pool.pop() if self._event_pool else torch.cuda.Event(enable_timing=True)
        event.record()
        self._batch_events.append(event)

    def _consume_oldest(self) -> None:
        wait_start, forward_start, forward_end = events = self._in_flight.popleft()
        self._data_wait_seconds += wait_start.elapsed_time(forward_start) / 1000
        self._forward_seconds += forward_start.elapsed_time(forward_end) / 1000
        self._event_pool += events

    def phase_seconds(self) -> tuple[float, float]:
        """Return the seconds of data wait and of forward passes since `start_epoch`. A host sync."""
        if self._in_flight:
            self._in_flight[-1][-1].synchronize()
        while self._in_flight:
            self._consume_oldest()
        return self._data_wait_seconds, self._forward_seconds


def gather_timings(clock: Clock, train_seconds: float, cpu_group: dist.ProcessGroup) -> list[RankEpochTiming]:
    """Return the timings of all ranks on rank 0, nothing on other ranks. A collective.

    `train_seconds` is this rank's duration of the epoch's training part.
    """
    local = torch.tensor([train_seconds, *clock.phase_seconds()], dtype=torch.float64)
    ranks = enumerate(gather(local, cpu_group))
    return [RankEpochTiming(rank, *(round(t, 4) for t in times.tolist())) for rank, times in ranks]


def data_wait_share(timings: Sequence[RankEpochTiming]) -> float | UnsetType:
    """Return the share of the training time spent waiting for data, averaged over ranks; UNSET without training."""
    seconds = sum(timing.seconds for timing in timings)
    if seconds <= 0:
        return UNSET
    return round(min(sum(timing.data_wait_seconds for timing in timings) / seconds, 1.0), 4)


class StepMarks:
    """Marks of profiled steps, in the trace and by their times. A phase lasts to the next `begin` or to the end of the
    step."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._step, self._phase = ExitStack(), ExitStack()
        self._marks: list[list[tuple[Part, torch.cuda.Event | float]]] = []
        self.count = 0
        """Number of completed steps."""

    def begin_step(self, step: int) -> None:
        """Begin the step with this global number."""
        self._step.enter_context(record_function(f"{MARK_PREFIX}step {step}"))
        self._marks.append([])
        self.begin("other")

    def begin(self, phase: Part) -> None:
        """End the phase of the step, and begin another one."""
        self._phase.close()
        self._phase.enter_context(record_function(f"{MARK_PREFIX}{phase}"))
        mark: torch.cuda.Event | float = time.perf_counter()
        if self._is_cuda:
            # The host runs ahead: the parts are what the device does.
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks[-1].append((phase, mark))

    def end_step(self) -> None:
        """End the step."""
        # Marks the end of the last phase.
        self.begin("other")
        self._phase.close()
        self._step.close()
        self.count += 1

    def parts(self) -> list[dict[Part, float]]:
        """Return the seconds of each part of each step. Call after synchronizing the device."""
        result = []
        for marks in self._marks[: self.count]:
            parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
            for (phase, mark), (_, following) in pairwise(marks):
                parts[phase] += _seconds_between(mark, following)
            result.append(parts)
        return result


def _seconds_between(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    if isinstance(first, float) or isinstance(second, float):
        return float(second) - float(first)  # type: ignore[arg-type]  # both are
    return float(first.elapsed_time(second)) / 1e3
