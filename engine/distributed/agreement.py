"""How all ranks come to do what was asked for at the same step, without waiting for each other in every step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from engine.runs.control import Asked

# About what passes between two questions. An answer takes one step more.
SECONDS = 0.5
# So that a stop is heard soon also where steps become slow.
MOST_CALLS = 32


class Agreement:
    """Called once a step by every rank; tells all of them the same at the same step.

    A question takes the most that any rank has been asked for. It is put every so many calls, and its answer is there
    at the next: the reduction runs on the host, in the background of a whole step. How many calls that are goes by
    `SECONDS` and the rank for which that is the fewest, and is agreed upon with each question: no rank's clock may
    decide it alone. While the run is to pause each call asks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._agreed = Asked()
        self._apart, self._calls = 1, 0
        self._since: float | None = None

    def __call__(self, asked: Callable[[], Asked]) -> Asked:
        """`asked` gives what this rank knows of."""
        agreed = self.settle()
        self._calls += 1
        if agreed.stop or (self._calls < self._apart and not agreed.paused):
            return agreed
        numbers = torch.tensor([-self._calls_apart(), *asked().numbers()])
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None  # noqa: S101 - async_op always gives one
        self._pending = (work, numbers)
        return agreed

    def _calls_apart(self) -> int:
        """How far this rank's next question may be from this one. It grows slowly: one step may be quick by chance."""
        before, self._since = self._since, time.monotonic()
        calls, self._calls = self._calls, 0
        if before is None:
            return 1
        seconds = max((self._since - before) / calls, 1e-6)
        return max(1, min(round(SECONDS / seconds), 2 * self._apart, MOST_CALLS))

    def settle(self) -> Asked:
        """What is agreed, with the answer of the question that is under way, if one is."""
        if self._pending is not None:
            work, numbers = self._pending
            work.wait()
            self._pending = None
            apart, *asked = numbers.tolist()
            self._apart, self._agreed = -apart, Asked.from_numbers(asked)
        return self._agreed
