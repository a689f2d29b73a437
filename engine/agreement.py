"""How all ranks come to do what was asked for at the same step, without waiting for each other in every step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from engine.control import Asked


class Agreement:
    """Asked once a step by every rank; tells all of them the same at the same step.

    Each answer is the most that any rank had been asked for one question earlier: the reduction runs on the host, in
    the background of a whole step.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._agreed = Asked()

    def __call__(self, asked: Asked) -> Asked:
        """`asked` is what this rank knows of."""
        agreed = self.settle()
        if agreed.stop:
            return agreed
        numbers = torch.tensor(asked.numbers())
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None  # noqa: S101 - async_op always gives one
        self._pending = (work, numbers)
        return agreed

    def settle(self) -> Asked:
        """What is agreed, with the answer of the question that is under way, if one is."""
        if self._pending is not None:
            work, numbers = self._pending
            work.wait()
            self._pending = None
            self._agreed = Asked.from_numbers(numbers.tolist())
        return self._agreed
