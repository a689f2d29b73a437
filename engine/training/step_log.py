"""Step losses: kept on the device, averaged over the ranks and reported in groups, without a host sync.

`loop` adds every step; `state_dict` saves and restores the steps that no event has reported yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.channel import Channel
from engine.distributed.collectives import all_gather, all_reduce
from engine.distributed.failures import NonFiniteLossError
from engine.runs.events import StepEvent
from engine.utils.codec import finite


@dataclass
class SkippedSteps:
    """Count of steps skipped because of a non-finite loss or gradient, without those that no event has reported yet."""

    max_consecutive: int
    total: int = 0
    consecutive: int = 0

    def add(self, nonfinite: bool) -> bool:
        """Count a step; return whether more than `max_consecutive` in a row were skipped."""
        self.total += nonfinite
        self.consecutive = self.consecutive + 1 if nonfinite else 0
        return self.consecutive > self.max_consecutive


@dataclass
class _PendingSteps:
    """Steps whose all-reduce is in progress.

    `means` (over the ranks) and `local` (of this rank) are 2 x steps: the losses, and 1 for each skipped step.
    """

    work: dist.Work | None
    means: Tensor
    local: Tensor
    step: int
    epoch: int
    lr: float
    images_per_second: float
    data_wait: float
    quantities: Mapping[str, Tensor]
    copy_done: torch.cuda.Event | None = None

    def wait(self) -> tuple[list[float], list[float]]:
        """Return the means; on a GPU this waits only for their copy, not for later work on the stream."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
        elif self.work is not None:
            self.work.wait()
        losses, skipped = self.means.tolist()
        return losses, skipped


@dataclass(kw_only=True, eq=False)
class StepLog:
    """Emit a `step` event after every `log_every` steps.

    Each group of steps is all-reduced in the background and read one step later on the CPU, one group later on a GPU,
    when the result is there without a wait. Every rank reads the same losses at the same step, so all ranks raise
    NonFiniteLossError at the same step. With `may_skip`, a non-finite loss belongs to a skipped step and is no error.
    """

    log_every: int
    global_batch: int
    device: torch.device
    channel: Channel
    skipped: SkippedSteps
    emits_events: bool
    may_skip: bool

    def __post_init__(self) -> None:
        # Scalars on the device, of the steps that no event has reported yet.
        self._losses: list[Tensor] = []
        self._nonfinite: list[Tensor] = []
        self._pending: _PendingSteps | None = None
        self.quantities: Mapping[str, Tensor] = {}
        """Those of `STEP_QUANTITIES` of the latest step, scalars on the device. They are the same on all ranks, so they
        are not reduced."""
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time since the last step, such as an evaluation or a checkpoint, from the throughput."""
        self._clock_start = time.perf_counter()
        self._steps = 0
        self._data_wait_seconds = 0.0

    def add_data_wait(self, seconds: float) -> None:
        """Add the time spent waiting for a batch."""
        self._data_wait_seconds += seconds

    def add(self, loss: Tensor, nonfinite: Tensor, step: int, epoch: int, lr: float) -> None:
        """Add a step; `nonfinite` is true if it was skipped. Raises NonFiniteLossError for an earlier step."""
        if self._pending is not None and self.device.type != "cuda":
            self.wait_pending()
        self._losses.append(loss)
        self._nonfinite.append(nonfinite)
        self._steps += 1
        if len(self._losses) >= self.log_every:
            self.start_reduction(step, epoch, lr)

    def _stack_unreported(self) -> Tensor:
        """Return 2 x steps on the device: the losses, and 1 for each skipped step."""
        if not self._losses:
            return torch.zeros((2, 0), device=self.device)
        return torch.stack([torch.stack(self._losses).float(), torch.stack(self._nonfinite).float()])

    def start_reduction(self, step: int, epoch: int, lr: float) -> None:
        """Start the all-reduce of the unreported steps. A collective."""
        self.wait_pending()
        if not self._losses:
            return
        local = self._stack_unreported()
        means = local / dist.get_world_size()
        self._losses, self._nonfinite = [], []
        work = all_reduce(means, async_op=True)
        seconds = max(time.perf_counter() - self._clock_start, 1e-9)
        self._pending = _PendingSteps(
            work,
            means,
            local,
            step=step,
            epoch=epoch,
            lr=lr,
            images_per_second=round(self._steps * self.global_batch / seconds, 1),
            data_wait=round(min(self._data_wait_seconds / seconds, 1.0), 4),
            quantities=self.quantities,
        )
        if means.is_cuda:
            if work is not None:
                # Makes the current stream wait, not the host.
                work.wait()
            self._pending.means = _copy_to_host(means)
            self._pending.quantities = {key: _copy_to_host(value) for key, value in self.quantities.items()}
            self._pending.copy_done = torch.cuda.Event()
            self._pending.copy_done.record()
        self.restart_clock()

    def wait_pending(self) -> list[float]:
        """Report the steps whose all-reduce is in progress, if any; return their losses, the same on all ranks.

        Raises NonFiniteLossError.
        """
        if self._pending is None:
            return []
        group, self._pending = self._pending, None
        losses, skipped = group.wait()
        if self.emits_events:
            known_losses = [finite(loss) for loss in losses]
            quantities: dict[str, Any] = {key: finite(value.item()) for key, value in group.quantities.items()}
            event = StepEvent(
                step=group.step,
                epoch=group.epoch,
                losses=known_losses,
                lr=finite(group.lr),
                images_per_second=group.images_per_second,
                data_wait=group.data_wait,
                **quantities,
            )
            self.channel.send(event)
        for index, loss in enumerate(losses):
            too_many = self.skipped.add(skipped[index] > 0.5)
            if too_many or not (self.may_skip or math.isfinite(loss)):
                step = group.step - len(losses) + 1 + index
                raise NonFiniteLossError(self._describe_nonfinite(step, group.epoch, loss, group.local[0, index]))
        return losses

    def _describe_nonfinite(self, step: int, epoch: int, loss: float, local_loss: Tensor) -> str:
        """Name the ranks whose loss is not finite. A collective."""
        rank_losses = all_gather(local_loss)
        ranks = [str(rank) for rank, rank_loss in enumerate(rank_losses) if not math.isfinite(rank_loss.item())]
        location = f" on rank {', '.join(ranks)}" if ranks and len(ranks) < len(rank_losses) else ""
        fault = "the gradient" if math.isfinite(loss) else "the loss"
        value = "not finite" if math.isfinite(loss) else str(loss)
        problem = f"{fault} of step {step} (epoch {epoch}) is {value}{location}"
        if self.skipped.consecutive > 1:
            return f"{problem}, and {self.skipped.consecutive} steps in a row were skipped; lower optim.lr"
        return f"{problem}; lower optim.lr, or skip such steps with optim.nonfinite=skip"

    def unreported(self) -> list[list[float]]:
        """Return this rank's losses of the steps that no event has reported yet, and 1 for each skipped step.

        A host sync.
        """
        steps: list[list[float]] = self._stack_unreported().tolist()
        return steps

    def total_skipped(self) -> int:
        """Return the number of skipped steps, including those that no event has reported yet. A host sync."""
        return self.skipped.total + round(sum(self.unreported()[1]))

    def check_unreported(self, step: int, epoch: int, lr: float) -> None:
        """Raise NonFiniteLossError now if the unreported steps would raise it later, before they enter a checkpoint.

        A collective if a step was skipped, which is the same on all ranks.
        """
        losses, skipped = self.unreported()
        if not any(skipped):
            return
        trial = replace(self.skipped)
        too_many = [trial.add(flag > 0.5) for flag in skipped]
        finite = torch.tensor(all(map(math.isfinite, losses)), dtype=torch.int32, device=self.device)
        all_reduce(finite, dist.ReduceOp.MIN)
        if any(too_many) or not (self.may_skip or finite.item()):
            self.start_reduction(step, epoch, lr)
            self.wait_pending()

    def restore_unreported(self, unreported: list[list[float]]) -> None:
        """Restore what `unreported` returned; only the latest steps if `run.log_every` has become smaller."""
        latest = torch.tensor(unreported, device=self.device)[:, max(len(unreported[0]) - self.log_every + 1, 0) :]
        self._losses, self._nonfinite = list(latest[0]), list(latest[1] > 0.5)


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Start a copy to pinned host memory, without a host sync."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
