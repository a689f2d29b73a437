"""The losses of single steps: kept on the device, averaged over the ranks and told in groups, without a wait."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.channel import Channel
from engine.distributed.failures import NonFiniteLossError
from engine.runs.events import StepEvent


@dataclass
class SkippedSteps:
    """Steps that were left out because a loss or a gradient was not finite; those of no event yet are not in it.
    `max_consecutive` is the most in a row."""

    max_consecutive: int
    total: int = 0
    consecutive: int = 0

    def add(self, nonfinite: bool) -> bool:
        """Whether there were too many in a row."""
        self.total += nonfinite
        self.consecutive = self.consecutive + 1 if nonfinite else 0
        return self.consecutive > self.max_consecutive


@dataclass
class _PendingSteps:
    """Steps on their way to being told: `means` over the ranks, and what this rank had, both 2 x steps: losses, and 1
    where a step was left out."""

    work: dist.Work
    means: Tensor
    local: Tensor
    event_fields: dict[str, Any]
    copy_done: torch.cuda.Event | None = None

    def wait(self) -> tuple[list[float], list[float]]:
        """The means. On a GPU for their copy alone, and not for what was asked of it since."""
        if self.copy_done is None:
            self.work.wait()
        else:
            self.copy_done.synchronize()
        losses, bad = self.means.tolist()
        return losses, bad


class StepLog:
    """Sends a `step` event for every `log_every` steps, by count.

    A group is reduced in the background and told one step later on the CPU, one group later on a GPU: by then it lies
    ready. Every rank sees the same losses at the same step, so all of them raise at the same step.
    """

    def __init__(
        self,
        log_every: int,
        global_batch: int,
        device: torch.device,
        channel: Channel,
        skipped: SkippedSteps,
        *,
        emits_events: bool,
        may_skip: bool,
    ) -> None:
        """With `may_skip` a loss that is not finite is one of a step that was left out, and no reason to raise."""
        self._log_every, self._device = log_every, device
        # Of the steps that no event has reported yet, each without a dimension, on the device.
        self._losses: list[Tensor] = []
        self._nonfinite: list[Tensor] = []
        self._global_batch = global_batch
        self._channel = channel
        self.skipped = skipped
        self._emits_events = emits_events
        self._may_skip = may_skip
        self._pending: _PendingSteps | None = None
        self._reads_late = device.type == "cuda"
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out of the rates what was done since the last step, as evaluation and saving."""
        self._clock_start = time.perf_counter()
        self._steps = 0
        self._data_wait_seconds = 0.0

    def add_data_wait(self, seconds: float) -> None:
        """The last batch came after so long."""
        self._data_wait_seconds += seconds

    def add(self, loss: Tensor, nonfinite: Tensor, step: int, epoch: int, lr: float) -> None:
        """`nonfinite` says that the step was left out. Raises NonFiniteLossError for an earlier step."""
        if self._pending is not None and not self._reads_late:
            self.wait_pending()
        self._losses.append(loss)
        self._nonfinite.append(nonfinite)
        self._steps += 1
        if len(self._losses) >= self._log_every:
            self.start_reduction(step, epoch, lr)

    def _stack_unreported(self) -> Tensor:
        """Losses, and 1 for each step that was left out: 2 x steps, on the device."""
        if not self._losses:
            return torch.zeros((2, 0), device=self._device)
        return torch.stack([torch.stack(self._losses).float(), torch.stack(self._nonfinite).float()])

    def start_reduction(self, step: int, epoch: int, lr: float) -> None:
        """Send off what no event has reported yet. A collective."""
        self.wait_pending()
        if not self._losses:
            return
        mine = self._stack_unreported()
        means = mine / dist.get_world_size()
        self._losses, self._nonfinite = [], []
        work = dist.all_reduce(means, async_op=True)
        assert work is not None  # noqa: S101 - async_op always gives one
        seconds = max(time.perf_counter() - self._clock_start, 1e-9)
        event_fields = {
            "step": step,
            "epoch": epoch,
            "lr": lr,
            "images_per_second": round(self._steps * self._global_batch / seconds, 1),
            "data_wait": round(min(self._data_wait_seconds / seconds, 1.0), 4),
        }
        self._pending = _PendingSteps(work, means, mine, event_fields)
        if means.is_cuda:
            # For the device's queue: the host goes on.
            work.wait()
            self._pending.means = torch.empty(means.shape, pin_memory=True).copy_(means, non_blocking=True)
            self._pending.copy_done = torch.cuda.Event()
            self._pending.copy_done.record()
        self.restart_clock()

    def wait_pending(self) -> None:
        """Tell the group that is under way, if one is. Raises NonFiniteLossError."""
        if self._pending is None:
            return
        group, self._pending = self._pending, None
        losses, bad = group.wait()
        if self._emits_events:
            self._channel.send(StepEvent(losses=losses, **group.event_fields))
        for index, loss in enumerate(losses):
            too_many = self.skipped.add(bad[index] > 0.5)
            if too_many or not (self._may_skip or math.isfinite(loss)):
                step = group.event_fields["step"] - len(losses) + 1 + index
                raise NonFiniteLossError(
                    self._describe_nonfinite(step, group.event_fields["epoch"], loss, group.local[0, index])
                )

    def _describe_nonfinite(self, step: int, epoch: int, loss: float, local_losses: Tensor) -> str:
        """A collective."""
        own = [torch.zeros_like(local_losses) for _ in range(dist.get_world_size())]
        dist.all_gather(own, local_losses)
        ranks = [str(rank) for rank, one in enumerate(own) if not math.isfinite(one.item())]
        where = f" on rank {', '.join(ranks)}" if ranks and len(ranks) < len(own) else ""
        what = "the gradient" if math.isfinite(loss) else "the loss"
        value = "not finite" if math.isfinite(loss) else str(loss)
        problem = f"{what} of step {step} (epoch {epoch}) is {value}{where}"
        if self.skipped.consecutive > 1:
            return f"{problem}, and {self.skipped.consecutive} steps in a row had to be left out; lower optim.lr"
        return f"{problem}; lower optim.lr, or leave such steps out with optim.nonfinite=skip"

    def unreported(self) -> list[list[float]]:
        """This rank's losses of the steps that no event has reported yet, and 1 for each that was left out. A wait for
        the device."""
        kept: list[list[float]] = self._stack_unreported().tolist()
        return kept

    def total_skipped(self) -> int:
        """Steps left out, with those that no event has reported yet. A wait for the device."""
        return self.skipped.total + round(sum(self.unreported()[1]))

    def check_unreported(self, step: int, epoch: int, lr: float) -> None:
        """Before anything is kept of them: raises NonFiniteLossError where the steps that no event has reported yet are
        a reason to. A collective where a step was left out, which all ranks know alike."""
        losses, bad = self.unreported()
        if not any(bad):
            return
        tried = replace(self.skipped)
        too_many = [tried.add(one > 0.5) for one in bad]
        finite = torch.tensor(all(map(math.isfinite, losses)), dtype=torch.int32, device=self._device)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        if any(too_many) or not (self._may_skip or finite.item()):
            self.start_reduction(step, epoch, lr)
            self.wait_pending()

    def restore_unreported(self, unreported: list[list[float]]) -> None:
        """Go on from what `unreported` gave. Where `log_every` has changed, only the latest find room."""
        latest = torch.tensor(unreported, device=self._device)[:, max(len(unreported[0]) - self._log_every + 1, 0) :]
        self._losses, self._nonfinite = list(latest[0]), list(latest[1] > 0.5)
