"""How all ranks come to do what was asked for at the same step, without waiting for each other in every step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from engine.runs.control import RequestCounters

# About what passes between two questions. An answer takes one step more.
POLL_INTERVAL_SECONDS = 0.5
# So that a stop is heard soon also where steps become slow.
MAX_POLL_INTERVAL_STEPS = 32


class Agreement:
    """Called once a step by every rank; tells all of them the same at the same step.

    A question takes the most that any rank has been asked for. It is put every so many calls, and its answer is there
    at the next: the reduction runs on the host, in the background of a whole step. How many calls that are goes by
    `POLL_INTERVAL_SECONDS` and the rank for which that is the fewest, and is agreed upon with each question: no rank's
    clock may decide it alone. While the run is to pause each call asks.
    """

    def __init__(self, cpu_group: dist.ProcessGroup) -> None:
        self._cpu_group = cpu_group
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._agreed = RequestCounters()
        self._interval_steps, self._steps_since_poll = 1, 0
        self._last_poll: float | None = None

    def __call__(self, poll_requests: Callable[[], RequestCounters]) -> RequestCounters:
        """`poll_requests` gives what this rank knows of."""
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
        """How far this rank's next question may be from this one. It grows slowly: one step may be quick by chance."""
        before, self._last_poll = self._last_poll, time.monotonic()
        calls, self._steps_since_poll = self._steps_since_poll, 0
        if before is None:
            return 1
        seconds = max((self._last_poll - before) / calls, 1e-6)
        return max(1, min(round(POLL_INTERVAL_SECONDS / seconds), 2 * self._interval_steps, MAX_POLL_INTERVAL_STEPS))

    def wait_pending(self) -> RequestCounters:
        """What is agreed, with the answer of the question that is under way, if one is."""
        if self._pending is not None:
            work, numbers = self._pending
            work.wait()
            self._pending = None
            apart, *asked = numbers.tolist()
            self._interval_steps, self._agreed = -apart, RequestCounters.from_list(asked)
        return self._agreed
