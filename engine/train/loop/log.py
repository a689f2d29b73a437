"""The log of one rank: metrics and losses of its steps, the best epoch, its clock, its events and its heartbeat.

Step losses stay on the device, and are averaged over the ranks and reported in groups, without a host sync. `loop` adds
every step; `checkpoint_writer` saves and `resume` restores the steps that no event has reported yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from engine.base.codec import finite, replace
from engine.base.errors import Problem
from engine.config.schema import Config
from engine.config.tasks import task_facts
from engine.runs.events import Event, StepEvent, WarningEvent
from engine.runs.history import EarlyStop
from engine.runs.monitor import config_monitor
from engine.train.distributed.channel import Channel
from engine.train.distributed.collectives import all_gather, all_reduce
from engine.train.distributed.failures import NonFiniteLossError
from engine.train.distributed.watchdog import Phase
from engine.train.loop.clock import Clock
from engine.train.loop.data import Position
from engine.train.loop.metrics import BestSoFar, MetricAccumulator
from engine.train.models.precision import max_scaler_skips


class MicroBatchResult(NamedTuple):
    """Mean loss and number of correct predictions of a micro-batch, both on the device; `weight` is its loss weight."""

    loss: Tensor
    correct: Tensor | None
    num_images: int
    weight: float


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

    `means` (over the ranks) and `local` (of this rank) are 2 x steps: the losses, and 1 for each skipped step. `event`
    still lacks the losses and the `quantities`.
    """

    work: dist.Work | None
    means: Tensor
    local: Tensor
    event: StepEvent
    quantities: Mapping[str, Tensor]
    copy_done: torch.cuda.Event | None = None


class TrainingLog:
    """The metrics of the epoch, and a `step` event after every `run.log_every` steps.

    Each group of steps is all-reduced in the background and read one step later on the CPU, one group later on a GPU,
    when the result is there without a wait. Every rank reads the same losses at the same step, so all ranks raise
    NonFiniteLossError at the same step. With `optim.nonfinite=skip`, a non-finite loss belongs to a skipped step.
    """

    def __init__(
        self, config: Config, device: torch.device, channel: Channel, rank: int, position: Position, global_batch: int
    ) -> None:
        self.device, self.channel, self._position, self._global_batch = device, channel, position, global_batch
        self._emits_events, self._log_every = rank == 0, config.run.log_every
        self._may_skip = config.optim.nonfinite == "skip"
        limit = config.optim.nonfinite_limit if self._may_skip else 0
        self.skipped = SkippedSteps(limit + max_scaler_skips(config.precision))
        self._has_accuracy = "accuracy" in task_facts(config).metrics
        self.clock, self.train_metrics = Clock(device), MetricAccumulator(device, self._has_accuracy)
        self.monitor = config_monitor(config)
        """The metric that selects the best epoch."""
        self.best, self.early_stop = BestSoFar(self.monitor), EarlyStop(config.run, self.monitor)
        self._reported_files: set[str] = set()
        # Scalars on the device, of the steps that no event has reported yet.
        self._losses: list[Tensor] = []
        self._nonfinite: list[Tensor] = []
        self._pending: _PendingSteps | None = None
        self.lr = 0.0
        """Learning rate of the latest step."""
        self.quantities: Mapping[str, Tensor] = {}
        """Those of `STEP_QUANTITIES` of the latest step, scalars on the device. They are the same on all ranks, so they
        are not reduced."""

    def emit(self, event: Event) -> None:
        """Emit an event once for all ranks."""
        if self._emits_events:
            self.channel.send(event)

    def warn(self, problem: Problem) -> None:
        """Emit a warning once for all ranks."""
        self.emit(WarningEvent.of(problem))

    def enter_phase(self, phase: Phase) -> None:
        """Write the heartbeat that the watchdog reads."""
        self.channel.enter_phase(self._position.step, phase)

    def start_epoch(self) -> None:
        """Reset the training metrics."""
        self.train_metrics = MetricAccumulator(self.device, self._has_accuracy)

    def count_unread(self, files: Sequence[str], metrics: MetricAccumulator) -> None:
        """Count the unreadable images of a batch, and warn once of each file."""
        metrics.counts[2] += len(files)
        for file in files:
            if file not in self._reported_files:
                self._reported_files.add(file)
                self.channel.send(WarningEvent(message=f"{file}; skipped", code="bad-image"))

    def add_step(
        self, results: Sequence[MicroBatchResult], nonfinite: Tensor, quantities: Mapping[str, Tensor], lr: float
    ) -> None:
        """Add a step to the metrics and the losses; `nonfinite` is true if it was skipped. Raises NonFiniteLossError
        for an earlier step."""
        for result in results:
            if result.weight > 0:
                self.train_metrics.add(result.loss, result.correct, result.num_images, nonfinite)
        step_loss = results[0].loss * results[0].weight
        for result in results[1:]:
            step_loss += result.loss * result.weight
        self.quantities, self.lr = quantities, lr
        if self._pending is not None and self.device.type != "cuda":
            self.wait_pending()
        self._losses.append(step_loss)
        self._nonfinite.append(nonfinite)
        if len(self._losses) >= self._log_every:
            self.start_reduction()

    def _stack_unreported(self) -> Tensor:
        """Return 2 x steps on the device: the losses, and 1 for each skipped step."""
        if not self._losses:
            return torch.zeros((2, 0), device=self.device)
        return torch.stack([torch.stack(self._losses).float(), torch.stack(self._nonfinite).float()])

    def start_reduction(self) -> None:
        """Start the all-reduce of the unreported steps. A collective."""
        self.wait_pending()
        if not self._losses:
            return
        local = self._stack_unreported()
        means = local / dist.get_world_size()
        self._losses, self._nonfinite = [], []
        work = all_reduce(means, async_op=True)
        images_per_second, data_wait = self.clock.throughput(self._global_batch)
        event = StepEvent(
            step=self._position.step,
            epoch=self._position.epoch,
            losses=[],
            lr=finite(self.lr),
            images_per_second=images_per_second,
            data_wait=data_wait,
        )
        self._pending = _PendingSteps(work, means, local, event, self.quantities)
        if means.is_cuda:
            if work is not None:
                # Makes the current stream wait, not the host.
                work.wait()
            self._pending.means = _copy_to_host(means)
            self._pending.quantities = {key: _copy_to_host(value) for key, value in self.quantities.items()}
            self._pending.copy_done = torch.cuda.Event()
            self._pending.copy_done.record()
        self.clock.restart_steps()

    def wait_pending(self) -> list[float]:
        """Report the steps whose all-reduce is in progress, if any; return their losses, the same on all ranks.

        Raises NonFiniteLossError.
        """
        if self._pending is None:
            return []
        group, self._pending = self._pending, None
        if group.copy_done is not None:
            # Only for the copy, not for later work on the stream.
            group.copy_done.synchronize()
        elif group.work is not None:
            group.work.wait()
        losses, skipped = cast(list[list[float]], group.means.tolist())
        if self._emits_events:
            quantities: dict[str, Any] = {key: finite(value.item()) for key, value in group.quantities.items()}
            self.channel.send(replace(group.event, losses=[finite(loss) for loss in losses], **quantities))
        for index, loss in enumerate(losses):
            too_many = self.skipped.add(skipped[index] > 0.5)
            if too_many or not (self._may_skip or math.isfinite(loss)):
                step = group.event.step - len(losses) + 1 + index
                raise NonFiniteLossError(self._describe_nonfinite(step, group.event.epoch, loss, group.local[0, index]))
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

    def flush(self) -> None:
        """Report all steps so far. A collective."""
        self.start_reduction()
        self.wait_pending()

    def check(self) -> None:
        """Raise NonFiniteLossError now if the unreported steps would raise it later, before they enter a checkpoint.

        A collective if a step was skipped, which is the same on all ranks.
        """
        self.wait_pending()
        losses, skipped = self.unreported()
        if not any(skipped):
            return
        trial = copy(self.skipped)
        too_many = [trial.add(flag > 0.5) for flag in skipped]
        finite = torch.tensor(all(map(math.isfinite, losses)), dtype=torch.int32, device=self.device)
        all_reduce(finite, dist.ReduceOp.MIN)
        if any(too_many) or not (self._may_skip or finite.item()):
            self.flush()

    def restore_unreported(self, unreported: list[list[float]]) -> None:
        """Restore what `unreported` returned; only the latest steps if `run.log_every` has become smaller."""
        latest = torch.tensor(unreported, device=self.device)[:, max(len(unreported[0]) - self._log_every + 1, 0) :]
        self._losses, self._nonfinite = list(latest[0]), list(latest[1] > 0.5)


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Start a copy to pinned host memory, without a host sync."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
