"""How all ranks come to stop at the same step without waiting for each other in every step."""

from __future__ import annotations

import torch
import torch.distributed as dist


class StopAgreement:
    """Asked once a step by every rank; says yes on all of them at the same step.

    Each answer is the maximum over the ranks of what they wished one question earlier: the reduction runs on the host,
    in the background of a whole step.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __call__(self, wish: bool) -> bool:
        answer = self.settle()
        if answer:
            return True
        flag = torch.tensor([int(wish)])
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None  # noqa: S101 - async_op always gives one
        self._pending = (work, flag)
        return False

    def settle(self) -> bool:
        """The answer of the question that is under way, if one is."""
        if self._pending is None:
            return False
        work, flag = self._pending
        work.wait()
        self._pending = None
        return bool(flag.item())
