"""Make all ranks handle control requests at the same step, without a synchronization in every step.

`engine.train.loop.control` calls `Agreement` between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from engine.runs.control import RequestCounters

# Target interval between two all-reduces of the requests. The result is available one step later.
POLL_INTERVAL_SECONDS = 0.5
# Bounds the delay of a stop request when steps become slow.
MAX_POLL_INTERVAL_STEPS = 32


class Agreement:
    """Called by every rank once per step; returns the same requests on all ranks at the same step.

    The requests of all ranks are combined by a MAX all-reduce on the host. It runs in the background of one step and
    its result is used in the next. The interval in steps follows from `POLL_INTERVAL_SECONDS` and the slowest rank;
    each all-reduce also agrees on the next interval, because the clocks of the ranks differ. A paused run polls in
    every call.
    """

    def __init__(self, cpu_group: dist.ProcessGroup) -> None:
        self._cpu_group = cpu_group
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._agreed = RequestCounters()
        self._interval_steps, self._steps_since_poll = 1, 0
        self._last_poll: float | None = None

    def __call__(self, poll_requests: Callable[[], RequestCounters]) -> RequestCounters:
        """Return the requests that all ranks have agreed on. `poll_requests` returns those that this rank received."""
        agreed = self.wait_pending()
        self._steps_since_poll += 1
        if agreed.stop or (self._steps_since_poll < self._interval_steps and not agreed.paused):
            return agreed
        numbers = torch.tensor([-self._next_interval_steps(), *poll_requests().to_list()])
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._cpu_group, async_op=True)
        assert work is not None  # noqa: S101 - async_op always gives one
        self._pending = (work, numbers)
        return agreed

    def _next_interval_steps(self) -> int:
        """Return the number of steps until this rank would poll again. It at most doubles, because one step can be fast
        by chance."""
        previous_poll, self._last_poll = self._last_poll, time.monotonic()
        steps, self._steps_since_poll = self._steps_since_poll, 0
        if previous_poll is None:
            return 1
        seconds = max((self._last_poll - previous_poll) / steps, 1e-6)
        return max(1, min(round(POLL_INTERVAL_SECONDS / seconds), 2 * self._interval_steps, MAX_POLL_INTERVAL_STEPS))

    def wait_pending(self) -> RequestCounters:
        """Wait for the pending all-reduce, if there is one, and return the agreed requests."""
        if self._pending is not None:
            work, numbers = self._pending
            work.wait()
            self._pending = None
            interval, *counters = numbers.tolist()
            self._interval_steps, self._agreed = -interval, RequestCounters.from_list(counters)
        return self._agreed
