"""The losses of single steps: kept on the device, averaged over the ranks and told in groups, without a wait."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.channel import Channel
from engine.events import Step


class NonFiniteLossError(Exception):
    """The loss is NaN or infinite; the text says where."""


@dataclass
class _Group:
    """Losses on their way to being told."""

    work: dist.Work
    losses: Tensor
    step: int
    epoch: int
    lr: float
    images_per_second: float
    data_wait: float


class StepLog:
    """Sends a `step` event for every `every` steps, by count.

    A group is reduced in the background and told one step later on the CPU, one group later on a GPU: by then it lies
    ready. Every rank sees the same losses at the same step, so all of them raise at the same step.
    """

    def __init__(self, every: int, global_batch: int, device: torch.device, channel: Channel, *, speaks: bool) -> None:
        self._losses = torch.zeros(every, device=device)
        self._filled = 0
        self._global_batch = global_batch
        self._channel = channel
        self._speaks = speaks
        self._pending: _Group | None = None
        self._told_late = device.type == "cuda"
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out of the rates what was done since the last step, as evaluation and saving."""
        self._since = time.perf_counter()
        self._steps = 0
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """The last batch came after so long."""
        self._waited += seconds

    def add(self, loss: Tensor, step: int, epoch: int, lr: float) -> None:
        """Raises NonFiniteLossError for an earlier step."""
        if self._pending is not None and not self._told_late:
            self.settle()
        self._losses[self._filled] = loss
        self._filled += 1
        self._steps += 1
        if self._filled == len(self._losses):
            self.tell(step, epoch, lr)

    def tell(self, step: int, epoch: int, lr: float) -> None:
        """Send off what no event has told yet. A collective."""
        self.settle()
        if self._filled == 0:
            return
        losses = self._losses[: self._filled] / dist.get_world_size()
        self._filled = 0
        work = dist.all_reduce(losses, async_op=True)
        assert work is not None  # noqa: S101 - async_op always gives one
        seconds = max(time.perf_counter() - self._since, 1e-9)
        rate = self._steps * self._global_batch / seconds
        self._pending = _Group(work, losses, step, epoch, lr, rate, min(self._waited / seconds, 1.0))
        self.restart_clock()

    def settle(self) -> None:
        """Tell the group that is under way, if one is. Raises NonFiniteLossError."""
        if self._pending is None:
            return
        group, self._pending = self._pending, None
        group.work.wait()
        losses: list[float] = group.losses.tolist()
        if self._speaks:
            self._channel.send(
                Step(
                    step=group.step,
                    epoch=group.epoch,
                    losses=losses,
                    lr=group.lr,
                    images_per_second=round(group.images_per_second, 1),
                    data_wait=round(group.data_wait, 4),
                )
            )
        for number, loss in enumerate(losses, group.step - len(losses) + 1):
            if not math.isfinite(loss):
                raise NonFiniteLossError(f"the loss of step {number} (epoch {group.epoch}) is {loss}")

    def untold(self) -> list[float]:
        """This rank's losses of the steps that no event has told yet. A wait for the device."""
        losses: list[float] = self._losses[: self._filled].tolist()
        return losses

    def take_back(self, losses: Sequence[float]) -> None:
        """Go on from what `untold` gave. Where `every` has changed, only the latest find room."""
        kept = list(losses)[-(len(self._losses) - 1) :] if len(self._losses) > 1 else []
        self._losses[: len(kept)] = torch.tensor(kept, dtype=self._losses.dtype)
        self._filled = len(kept)
