"""Train one epoch, evaluate: the loop, in the order in which it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from engine.agreement import Agreement
from engine.beats import Place
from engine.channel import Channel
from engine.compiled import compiled_for
from engine.config import Config
from engine.data.device import DeviceBatch, DeviceBatches
from engine.data.mix import Mixer
from engine.data.sampler import Shares
from engine.data.source import ImageFormat, UnreadableImageError
from engine.ema import Ema
from engine.evaluation import Evaluation, Sums, Tally, Totals
from engine.events import Warned
from engine.failure import NonFiniteLossError
from engine.freeze import set_training
from engine.layout import memory_format
from engine.losses import Criterion
from engine.optim import set_lr, take_step
from engine.plateau import Plateau
from engine.precision import autocast, give_gradients, input_type, take_weights
from engine.schedule import lr_factor, scaled_lr
from engine.steplog import StepLog
from engine.work import Work

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


@dataclass
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


# Asked between two steps by all ranks, to do what was asked of the run; true where they agreed to stop.
Attend = Callable[[], bool]


def train_epoch(t: Trainer, attend: Attend) -> bool:
    """Train from the position to the end of its epoch; False where all ranks agreed to stop on the way."""
    set_training(t.model, t.frozen)
    t.log.restart_clock()
    while t.position.batch < t.shares.steps_per_epoch:
        if attend():
            return False
        train_step(t)
    return True


def train_step(t: Trainer) -> None:
    """One optimizer step on the next batches of each rank. Where a loss or a gradient is not finite on any of them, all
    leave the step out: they know it by the gradient, which they have in common, and without a wait for the device."""
    lr = t.lr(t.position.epoch, t.position.batch + 1)
    set_lr(t.optimizer, lr)
    before = t.keep_buffers()
    t.forget_gradients()
    seen: list[Seen] = []
    ends_step = False
    while not ends_step:
        t.work.wait()
        batch = t.next_batch(t.totals)
        t.log.waited(t.work.arrived())
        ends_step = batch.ends_step
        with nullcontext() if ends_step else t.without_sync():
            seen.append(forward_and_back(t, batch, len(seen)))
        # Its images make room for those of the next.
        del batch

    if t.master is not None:
        give_gradients(t.model, t.master)
    bad = limit_gradients(t)
    if t.scaler.is_enabled():
        t.scaler.step(t.optimizer)
        t.scaler.update()
    else:
        take_step(t.optimizer, bad, may_skip=t.config.optim.nonfinite == "skip")
    if t.master is not None:
        take_weights(t.model, t.master)
    t.put_buffers_back(before, bad)

    t.position.step += 1
    t.position.batch += 1
    if t.ema is not None:
        t.ema.update(t.weights, t.position.step)
    for one in seen:
        if one.weight > 0:
            t.totals.add(one.loss, one.right, one.images, bad)
    told = seen[0].loss * seen[0].weight
    for one in seen[1:]:
        told += one.loss * one.weight
    t.log.add(told, bad, t.position.step, t.position.epoch, lr)


def forward_and_back(t: Trainer, batch: DeviceBatch, number: int) -> Seen:
    """Adds a batch, the step's `number`-th from 0, to the gradients."""
    t.channel.at(t.position.step, Place.FORWARD)
    images, targets = batch.images, batch.labels
    if t.mixer.mixes:
        place = t.position.batch * t.shares.accumulate + number
        images, targets = t.mixer(images, targets, t.position.epoch, place, t.shares.rank)
    with autocast(t.config.precision, t.device):
        logits = t.logits_of(t.wrapped, images, input_type(t.config.precision))
        loss = t.criterion(logits, targets)
    t.work.forwarded()
    t.channel.at(t.position.step, Place.BACKWARD)
    # A loss that is not finite takes the gradient along, also where that would have stayed finite.
    # Not as an argument of `backward`, for which torch imports sympy.
    weighed = loss * (loss.detach() * 0).add_(batch.weight)
    (t.scaler.scale(weighed) if t.scaler.is_enabled() else weighed).backward()
    # Now: a CUDA graph writes the logits of the next batch over these.
    right = (logits.detach().argmax(1) == batch.labels).sum()
    return Seen(loss.detach(), right, len(batch.labels), batch.weight)


def limit_gradients(t: Trainer) -> Tensor:
    """Clip what is to be clipped; whether a gradient is not finite, on the device."""
    optim = t.config.optim
    clips = optim.clip_norm > 0 or optim.clip_value > 0
    if clips and t.scaler.is_enabled():
        t.scaler.unscale_(t.optimizer)
    parameters = [one for group in t.optimizer.param_groups for one in group["params"] if one.grad is not None]
    gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
    norm = total_norm(gradients)
    # As well for NaN; isfinite would take four times as many kernels.
    bad = (norm < math.inf).logical_not_()
    if optim.clip_value > 0:
        clip_grad_value_(parameters, optim.clip_value)
    if optim.clip_norm > 0:
        if optim.clip_value > 0 or optim.clip_norm_type != 2:
            norm = total_norm(gradients, float(optim.clip_norm_type))
        clip_grads_with_norm_(parameters, optim.clip_norm, norm)
    return bad


def total_norm(gradients: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """In float32: the norm of what is finite in float16 may not be. As torch's get_total_norm, less its sorting by type
    and device, and with one call for all gradients on the CPU as well."""
    wide = [one.float() if one.dtype == torch.float16 else one for one in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(wide, norm_type)), norm_type)
    return norm


def evaluate(t: Trainer, attend: Attend) -> tuple[Evaluation, Evaluation | None] | None:
    """What the model makes of all validation images, each counted once, and what the averaged weights make of them
    where there are such; None where all ranks agreed to stop. Raises NonFiniteLossError, on all ranks alike."""
    models = [t.model.eval()]
    if t.ema is not None:
        t.ema.take_buffers(t.model)
        models.append(t.ema.model)
    tallies = [Tally(t.device, t.classes) for _ in models]
    types = [input_type(t.config.precision), torch.float32]
    # Ranks may differ by one batch; they can only agree on stopping while all of them have one.
    shared = t.shares.val_images // t.shares.world_size // t.shares.batch_size
    with torch.no_grad():
        for number, _ in enumerate(t.shares.val()):
            if number < shared and attend():
                return None
            batch = t.next_batch(tallies[0].totals)
            t.channel.at(t.position.step, Place.EVALUATION)
            for model, tally, type_ in zip(models, tallies, types, strict=False):
                with autocast(t.config.precision, t.device):
                    logits = t.logits_of(model, batch.images, type_)
                    loss = t.criterion(logits, batch.labels)
                if batch.weight > 0:
                    tally.add(loss, logits, batch.labels)
    t.channel.at(t.position.step, Place.MEETING)
    found = [tally.over_ranks() for tally in tallies]
    if not math.isfinite(found[0].sums.loss):
        raise NonFiniteLossError(f"the validation loss of epoch {t.position.epoch} is {found[0].sums.loss}")
    return found[0], found[1] if t.ema is not None else None


def share_buffers(model: nn.Module) -> None:
    """Give every rank the running statistics of rank 0. A collective."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def finish_training(t: Trainer) -> Sums:
    """Sums over the images of the epoch that was trained. Raises NonFiniteLossError. A collective."""
    epoch = t.position.epoch
    t.channel.at(t.position.step, Place.MEETING)
    t.log.settle()
    t.log.check_untold(t.position.step, epoch, t.lr(epoch, t.position.batch))
    sums = t.totals.over_ranks()
    if not math.isfinite(sums.loss):
        raise NonFiniteLossError(f"no step of epoch {epoch} could be taken: the losses are not finite; lower optim.lr")
    return sums
