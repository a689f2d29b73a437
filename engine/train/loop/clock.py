"""The time of one rank: of the epoch, of the steps that no event has reported yet, and of the phases of a step.

The wait for data and the forward pass contain no collective, so a straggler stands out in them; in the backward pass
all ranks wait for it. On a GPU they are measured with CUDA events, which are read once they have completed, without a
host sync. The data wait is then the time in which the device is idle for lack of a batch or prepares one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from engine.base.codec import UNSET, UnsetType
from engine.runs.profile_file import PARTS, Part
from engine.runs.records import RankEpochTiming
from engine.train.distributed.collectives import gather

# Begin of the names of the marks in the trace of a profile.
MARK_PREFIX = "gputrain: "


class Clock:
    """Clock of one rank. Call `begin` where a part of a step begins, which lasts until the next one begins."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.profiled: list[dict[Part, float]] | None = None
        """Seconds of each part of each profiled step; None unless steps are profiled."""
        self._step_mark, self._part_mark = ExitStack(), ExitStack()
        self.start_epoch()

    def start_epoch(self) -> None:
        """Reset all times."""
        self._epoch_start, self._stopped_seconds = time.perf_counter(), 0.0
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        # The sums that the seconds of the current part are added to.
        self._sums = [self._seconds]
        self._begun: deque[tuple[Part, float | torch.cuda.Event, list[dict[Part, float]]]] = deque()
        self._wait_started = 0.0
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

    def begin_step(self, step: int) -> None:
        """Begin the step with this global number, and count it in its group."""
        self._steps += 1
        if self.profiled is not None:
            self._step_mark.enter_context(record_function(f"{MARK_PREFIX}step {step}"))
            self.profiled.append(dict.fromkeys(PARTS, 0.0))
            self._sums = [self._seconds, self.profiled[-1]]
        self.begin("other")

    def begin(self, part: Part) -> None:
        """Begin a part of a step."""
        now = time.perf_counter()
        if part == "data":
            self._wait_started = now
        elif part == "forward":
            self._steps_wait_seconds += now - self._wait_started
        if self.profiled is not None:
            self._part_mark.close()
            self._part_mark.enter_context(record_function(f"{MARK_PREFIX}{part}"))
        elif part in ("optimizer", "other"):
            # Each event takes a microsecond, and only a profile shows these parts.
            return
        mark: float | torch.cuda.Event = now
        if self._is_cuda:
            # The host runs ahead: the parts are what the device does.
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._begun.append((part, mark, self._sums))
        self._add_ended()

    def end_step(self) -> None:
        """End the step."""
        self._sums = [self._seconds]
        self.begin("other")
        self._part_mark.close()
        self._step_mark.close()

    def _add_ended(self, *, wait: bool = False) -> None:
        """Add the seconds of the parts that have ended, on a GPU of those that it has computed unless `wait`."""
        while len(self._begun) > 1:
            (part, start, sums), (_, end, _) = self._begun[0], self._begun[1]
            if isinstance(start, float) or isinstance(end, float):
                seconds = float(end) - float(start)  # type: ignore[arg-type]  # both are
            elif wait or end.query():
                end.synchronize()
                seconds = start.elapsed_time(end) / 1000
            else:
                return
            for each in sums:
                each[part] += seconds
            self._begun.popleft()

    def part_seconds(self) -> dict[Part, float]:
        """Return the seconds of each part since `start_epoch`. A host sync."""
        self._add_ended(wait=True)
        return self._seconds


def gather_timings(clock: Clock, train_seconds: float, cpu_group: dist.ProcessGroup) -> list[RankEpochTiming]:
    """Return the timings of all ranks on rank 0, nothing on other ranks. A collective.

    `train_seconds` is this rank's duration of the epoch's training part.
    """
    seconds = clock.part_seconds()
    local = torch.tensor([train_seconds, seconds["data"], seconds["forward"]], dtype=torch.float64)
    ranks = enumerate(gather(local, cpu_group))
    return [RankEpochTiming(rank, *(round(t, 4) for t in times.tolist())) for rank, times in ranks]


def data_wait_share(timings: Sequence[RankEpochTiming]) -> float | UnsetType:
    """Return the share of the training time spent waiting for data, averaged over ranks; UNSET without training."""
    seconds = sum(timing.seconds for timing in timings)
    if seconds <= 0:
        return UNSET
    return round(min(sum(timing.data_wait_seconds for timing in timings) / seconds, 1.0), 4)
