"""What a rank holds while it trains: model, optimizer and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from engine.config.schema import Config
from engine.data.augment.mixup import MixupCutmix
from engine.data.pipelines.device import DeviceBatch, DeviceLoader
from engine.data.sampler import DistributedBatchSampler
from engine.data.sources.base import ImageFormat, UnreadableImageError
from engine.distributed.agreement import Agreement
from engine.distributed.channel import Channel
from engine.distributed.watchdog import Phase
from engine.models.compile import eager_for_partial_batch
from engine.models.ema import ModelEma
from engine.models.memory_format import resolve_memory_format
from engine.optim.lr_schedule import lr_factor, scaled_lr
from engine.optim.plateau import PlateauFactor
from engine.runs.events import WarningEvent
from engine.training.losses import Criterion
from engine.training.metrics import MetricAccumulator
from engine.training.step_log import StepLog
from engine.training.timing import PhaseTimer

# With so many batches in a row of which nothing can be read it is not the images that are bad.
MAX_UNREADABLE_BATCHES = 10


@dataclass
class Position:
    """`batch` batches of `epoch` (from 1) are done, `step` steps in all."""

    epoch: int = 1
    batch: int = 0
    step: int = 0


class BatchResult(NamedTuple):
    """Of a batch in training: its mean loss and how many of its images were right, both on the device."""

    loss: Tensor
    correct: Tensor
    num_images: int
    weight: float


@dataclass(kw_only=True)
class RankState:
    """All that one rank trains with. `model` is what computes, `wrapped` the same in DistributedDataParallel or
    DataParallel; `master` holds the weights that the optimizer changes where those are not the model's own."""

    config: Config
    device: torch.device
    sampler: DistributedBatchSampler
    model: nn.Module
    wrapped: nn.Module
    master: nn.Module | None
    frozen_modules: list[nn.Module]
    criterion: Criterion
    mixer: MixupCutmix
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    plateau: PlateauFactor
    ema: ModelEma | None
    batches: DeviceLoader
    image_format: ImageFormat
    num_classes: int
    channel: Channel
    agreement: Agreement
    step_log: StepLog
    position: Position
    totals: MetricAccumulator

    def __post_init__(self) -> None:
        self.timer = PhaseTimer(self.device)
        self._reported_files: set[str] = set()
        self._consecutive_unreadable = 0
        self._restores_buffers = self.config.optim.nonfinite == "skip"
        # Taken once: to walk through the modules of a model takes longer than many of its steps' parts.
        self._parameters = list(self.model.parameters())
        self.memory_format = resolve_memory_format(self.config, self.model, self.device)

    @property
    def trained_model(self) -> nn.Module:
        """The model with the weights that the optimizer changes."""
        return self.master or self.model

    def next_batch(self, totals: MetricAccumulator) -> DeviceBatch:
        """What of the batch could not be read is counted in `totals`."""
        self.channel.enter_phase(self.position.step, Phase.DATA)
        batch = next(self.batches)
        if batch.unread:
            totals.counts[2] += len(batch.unread)
            self._warn_unreadable(batch.unread)
        self._consecutive_unreadable = (
            self._consecutive_unreadable + 1 if batch.unread and batch.loss_weight == 0 else 0
        )
        if self._consecutive_unreadable > MAX_UNREADABLE_BATCHES:
            raise UnreadableImageError(
                f"no image of {self._consecutive_unreadable} batches in a row: {batch.unread[0]}"
            )
        return batch

    def _warn_unreadable(self, files: Sequence[str]) -> None:
        """Each file once."""
        fresh = [file for file in files if file not in self._reported_files]
        self._reported_files.update(fresh)
        for file in fresh:
            self.channel.send(WarningEvent(message=f"{file}; it is left out"))

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def snapshot_buffers(self) -> list[Tensor]:
        """Copies of the model's buffers, where a step may be left out: the running statistics of BatchNorm take in what
        is not finite in the forward pass already."""
        return [buffer.clone() for buffer in self.model.buffers()] if self._restores_buffers else []

    def restore_buffers(self, snapshot: Sequence[Tensor], nonfinite: Tensor) -> None:
        """Where `nonfinite`."""
        if snapshot:
            for buffer, old in zip(self.model.buffers(), snapshot, strict=True):
                buffer.copy_(torch.where(nonfinite, old, buffer))

    def lr(self, epoch: int, batch: int) -> float:
        """Learning rate of the step on the epoch's `batch`-th batch, from 1. Taken from the place in the data and not
        from a count of steps: a run that goes on with another batch size keeps its schedule."""
        step = (epoch - 1) * self.sampler.steps_per_epoch + batch
        factor = lr_factor(self.config.schedule, step, self.sampler.steps_per_epoch, self.config.run.epochs)
        return scaled_lr(self.config.optim, self.sampler.num_devices) * factor * self.plateau.factor

    def compute_logits(self, model: Callable[[Tensor], Tensor], images: Tensor, dtype: torch.dtype) -> Tensor:
        """What the model, wrapped or not, gives for images. To be called in `autocast`."""
        with eager_for_partial_batch(self.config, len(images), self.sampler.batch_size):
            logits: Tensor = model(images.to(dtype, memory_format=self.memory_format))
        return logits

    def no_sync(self) -> AbstractContextManager[None]:
        """In it the gradients of a rank stay with it, until more are added to them."""
        if isinstance(self.wrapped, DistributedDataParallel):
            return cast(AbstractContextManager[None], self.wrapped.no_sync())
        return nullcontext()
