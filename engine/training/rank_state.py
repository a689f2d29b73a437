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
from engine.data.augment.mixup import Mixer
from engine.data.pipelines.device import DeviceBatch, DeviceBatches
from engine.data.sampler import Shares
from engine.data.sources.base import ImageFormat, UnreadableImageError
from engine.distributed.agreement import Agreement
from engine.distributed.channel import Channel
from engine.distributed.watchdog import Place
from engine.models.compile import compiled_for
from engine.models.ema import Ema
from engine.models.memory_format import memory_format
from engine.optim.lr_schedule import lr_factor, scaled_lr
from engine.optim.plateau import Plateau
from engine.runs.events import Warned
from engine.training.losses import Criterion
from engine.training.metrics import Totals
from engine.training.step_log import StepLog
from engine.training.timing import Work

# With so many batches in a row of which nothing can be read it is not the images that are bad.
MOST_UNREAD_BATCHES = 10


@dataclass
class Position:
    """`batch` batches of `epoch` (from 1) are done, `step` steps in all."""

    epoch: int = 1
    batch: int = 0
    step: int = 0


class Seen(NamedTuple):
    """Of a batch in training: its mean loss and how many of its images were right, both on the device."""

    loss: Tensor
    right: Tensor
    images: int
    weight: float


@dataclass(kw_only=True)
class Trainer:
    """All that one rank trains with. `model` is what computes, `wrapped` the same in DistributedDataParallel or
    DataParallel; `master` holds the weights that the optimizer changes where those are not the model's own."""

    config: Config
    device: torch.device
    shares: Shares
    model: nn.Module
    wrapped: nn.Module
    master: nn.Module | None
    frozen: list[nn.Module]
    criterion: Criterion
    mixer: Mixer
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    plateau: Plateau
    ema: Ema | None
    batches: DeviceBatches
    image_format: ImageFormat
    classes: int
    channel: Channel
    agree: Agreement
    log: StepLog
    position: Position
    totals: Totals

    def __post_init__(self) -> None:
        self.work = Work(self.device)
        self._told: set[str] = set()
        self._unread_in_row = 0
        self._keeps_buffers = self.config.optim.nonfinite == "skip"
        # Taken once: to walk through the modules of a model takes longer than many of its steps' parts.
        self._own = list(self.model.parameters())
        self.memory_format = memory_format(self.config, self.model, self.device)

    @property
    def weights(self) -> nn.Module:
        """The model with the weights that the optimizer changes."""
        return self.master or self.model

    def next_batch(self, totals: Totals) -> DeviceBatch:
        """What of the batch could not be read is counted in `totals`."""
        self.channel.at(self.position.step, Place.DATA)
        batch = next(self.batches)
        if batch.unread:
            totals.counts[2] += len(batch.unread)
            self._tell_unread(batch.unread)
        self._unread_in_row = self._unread_in_row + 1 if batch.unread and batch.weight == 0 else 0
        if self._unread_in_row > MOST_UNREAD_BATCHES:
            raise UnreadableImageError(f"no image of {self._unread_in_row} batches in a row: {batch.unread[0]}")
        return batch

    def _tell_unread(self, files: Sequence[str]) -> None:
        """Each file once."""
        fresh = [file for file in files if file not in self._told]
        self._told.update(fresh)
        for file in fresh:
            self.channel.send(Warned(message=f"{file}; it is left out"))

    def forget_gradients(self) -> None:
        for parameter in self._own:
            parameter.grad = None

    def keep_buffers(self) -> list[Tensor]:
        """Copies of the model's buffers, where a step may be left out: the running statistics of BatchNorm take in what
        is not finite in the forward pass already."""
        return [buffer.clone() for buffer in self.model.buffers()] if self._keeps_buffers else []

    def put_buffers_back(self, before: Sequence[Tensor], bad: Tensor) -> None:
        """Where `bad`."""
        if before:
            for buffer, old in zip(self.model.buffers(), before, strict=True):
                buffer.copy_(torch.where(bad, old, buffer))

    def lr(self, epoch: int, batch: int) -> float:
        """Learning rate of the step on the epoch's `batch`-th batch, from 1. Taken from the place in the data and not
        from a count of steps: a run that goes on with another batch size keeps its schedule."""
        step = (epoch - 1) * self.shares.steps_per_epoch + batch
        factor = lr_factor(self.config.schedule, step, self.shares.steps_per_epoch, self.config.run.epochs)
        return scaled_lr(self.config.optim, self.shares.devices) * factor * self.plateau.factor

    def logits_of(self, model: Callable[[Tensor], Tensor], images: Tensor, type_: torch.dtype) -> Tensor:
        """What the model, wrapped or not, gives for images. To be called in `autocast`."""
        with compiled_for(self.config, len(images), self.shares.batch_size):
            logits: Tensor = model(images.to(type_, memory_format=self.memory_format))
        return logits

    def without_sync(self) -> AbstractContextManager[None]:
        """In it the gradients of a rank stay with it, until more are added to them."""
        if isinstance(self.wrapped, DistributedDataParallel):
            return cast(AbstractContextManager[None], self.wrapped.no_sync())
        return nullcontext()
