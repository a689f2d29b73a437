"""Train one epoch, evaluate: the loop, in the order in which it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from engine.agreement import Agreement
from engine.beats import Place
from engine.channel import Channel
from engine.config import Config
from engine.data.loader import Batches
from engine.data.sampler import Shares
from engine.data.source import ImageFormat, UnreadableImageError
from engine.data.transforms import normalise
from engine.events import Warned
from engine.failure import NonFiniteLossError
from engine.optim import skip_if
from engine.precision import autocast
from engine.schedule import lr_factor, scaled_lr
from engine.steplog import StepLog

# With so many batches in a row of which nothing can be read it is not the images that are bad.
MOST_UNREAD_BATCHES = 10


@dataclass
class Position:
    """`batch` batches of `epoch` (from 1) are done, `step` steps in all."""

    epoch: int = 1
    batch: int = 0
    step: int = 0


@dataclass
class Totals:
    """A rank's running sums over images, on its device until they are asked for."""

    device: torch.device
    loss: Tensor = field(init=False)
    counts: Tensor = field(init=False)
    """Images that were right, all that were taken, and those that could not be read."""

    def __post_init__(self) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=self.device)

    def add(self, mean_loss: Tensor, logits: Tensor, labels: Tensor, bad: Tensor | None = None) -> None:
        """`bad` says of a batch that it counts for nothing."""
        loss = mean_loss.detach().double() * len(labels)
        right = (logits.detach().argmax(1) == labels).sum()
        if bad is None:
            self.loss += loss
            self.counts[0] += right
            self.counts[1] += len(labels)
        else:
            self.loss += torch.where(bad, 0.0, loss)
            self.counts[0] += torch.where(bad, 0, right)
            self.counts[1] += torch.where(bad, 0, len(labels))

    def over_ranks(self) -> Sums:
        """A collective."""
        loss, counts = self.loss.clone(), self.counts.clone()
        dist.all_reduce(loss)
        dist.all_reduce(counts)
        correct, images, unread = (int(value) for value in counts.tolist())
        if images == 0:
            return Sums(math.nan, 0.0, unread)
        return Sums(loss.item() / images, correct / images, unread)


@dataclass(frozen=True)
class Sums:
    """Of a part of the data, over all ranks: mean loss (NaN where no image counted), accuracy, and images that could
    not be read."""

    loss: float
    accuracy: float
    unread: int


@dataclass
class Trainer:
    """All that one rank trains with."""

    config: Config
    device: torch.device
    shares: Shares
    model: nn.Module
    ddp: DistributedDataParallel
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    batches: Batches
    image_format: ImageFormat
    channel: Channel
    agree: Agreement
    log: StepLog
    position: Position
    totals: Totals

    def __post_init__(self) -> None:
        shape = (1, self.image_format.channels, 1, 1)
        self._mean = torch.tensor(self.image_format.mean, device=self.device).view(shape)
        self._std = torch.tensor(self.image_format.std, device=self.device).view(shape)
        self._told: set[str] = set()
        self._unread_in_row = 0
        self._keeps_buffers = self.config.optim.nonfinite == "skip"

    def next_batch(self, totals: Totals) -> tuple[Tensor, Tensor, float]:
        """Normalised images, labels and weight of the next batch, on the device; what of it could not be read is
        counted in `totals`."""
        self.channel.at(self.position.step, Place.DATA)
        batch = next(self.batches)
        if batch.unread:
            totals.counts[2] += len(batch.unread)
            self._tell_unread(batch.unread)
        self._unread_in_row = self._unread_in_row + 1 if batch.unread and batch.weight == 0 else 0
        if self._unread_in_row > MOST_UNREAD_BATCHES:
            raise UnreadableImageError(f"no image of {self._unread_in_row} batches in a row: {batch.unread[0]}")
        images, labels = batch.images, batch.labels
        if self.device.type == "cuda":
            images, labels = images.pin_memory(), labels.pin_memory()
        images = normalise(images.to(self.device, non_blocking=True), self._mean, self._std)
        return images, labels.to(self.device, non_blocking=True), batch.weight

    def _tell_unread(self, files: Sequence[str]) -> None:
        """Each file once."""
        fresh = [file for file in files if file not in self._told]
        self._told.update(fresh)
        for file in fresh:
            self.channel.send(Warned(message=f"{file}; it is left out"))

    def keep_buffers(self) -> list[Tensor]:
        """Copies of the model's buffers, where a step may be left out: the running statistics of BatchNorm take in what
        is not finite in the forward pass already."""
        return [buffer.clone() for buffer in self.model.buffers()] if self._keeps_buffers else []

    def put_buffers_back(self, before: Sequence[Tensor], bad: Tensor) -> None:
        """Where `bad`."""
        for buffer, old in zip(self.model.buffers(), before, strict=False):
            buffer.copy_(torch.where(bad, old, buffer))

    def lr(self, epoch: int, batch: int) -> float:
        """Learning rate of the step on the epoch's `batch`-th batch, from 1. Taken from the place in the data and not
        from a count of steps: a run that goes on with another batch size keeps its schedule."""
        step = (epoch - 1) * self.shares.steps_per_epoch + batch
        factor = lr_factor(self.config.schedule, step, self.shares.steps_per_epoch, self.config.run.epochs)
        return scaled_lr(self.config.optim, self.shares.world_size) * factor


# Asked between two steps by all ranks, to do what was asked of the run; true where they agreed to stop.
Attend = Callable[[], bool]


def train_epoch(t: Trainer, attend: Attend) -> bool:
    """Train from the position to the end of its epoch; False where all ranks agreed to stop on the way."""
    t.model.train()
    t.log.restart_clock()
    while t.position.batch < t.shares.steps_per_epoch:
        if attend():
            return False
        waiting = time.perf_counter()
        images, labels, weight = t.next_batch(t.totals)
        t.log.waited(time.perf_counter() - waiting)
        train_step(t, images, labels, weight)
    return True


def train_step(t: Trainer, images: Tensor, labels: Tensor, weight: float) -> None:
    """One optimizer step on one batch of each rank. Where a loss or a gradient is not finite on any of them, all leave
    the step out: they know it by the gradient, which they have in common, and without a wait for the device."""
    lr = t.lr(t.position.epoch, t.position.batch + 1)
    for group in t.optimizer.param_groups:
        group["lr"] = lr
    before = t.keep_buffers()

    t.channel.at(t.position.step, Place.FORWARD)
    with autocast(t.config.precision, t.device):
        logits = t.ddp(images)
        loss = F.cross_entropy(logits, labels)
    t.optimizer.zero_grad(set_to_none=True)
    t.channel.at(t.position.step, Place.BACKWARD)
    # A loss that is not finite takes the gradient along, also where that would have stayed finite.
    t.scaler.scale(loss * (weight + 0 * loss.detach())).backward()
    parameters = (parameter for group in t.optimizer.param_groups for parameter in group["params"])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    bad = ~torch.isfinite(torch.nn.utils.get_total_norm(gradients))
    if t.scaler.is_enabled():
        t.scaler.step(t.optimizer)
        t.scaler.update()
    else:
        skip_if(t.optimizer, bad)
        t.optimizer.step()
    t.put_buffers_back(before, bad)

    t.position.step += 1
    t.position.batch += 1
    if weight > 0:
        t.totals.add(loss, logits, labels, bad)
    t.log.add(loss.detach() * weight, bad, t.position.step, t.position.epoch, lr)


def evaluate(t: Trainer, attend: Attend) -> Sums | None:
    """Sums over all validation images, each counted once; None where all ranks agreed to stop. Raises
    NonFiniteLossError, on all ranks alike."""
    t.model.eval()
    totals = Totals(t.device)
    # Ranks may differ by one batch; they can only agree on stopping while all of them have one.
    shared = t.shares.val_images // t.shares.world_size // t.shares.batch_size
    with torch.no_grad():
        for number, _ in enumerate(t.shares.val()):
            if number < shared and attend():
                return None
            images, labels, weight = t.next_batch(totals)
            t.channel.at(t.position.step, Place.EVALUATION)
            with autocast(t.config.precision, t.device):
                logits = t.model(images)
                loss = F.cross_entropy(logits, labels)
            if weight > 0:
                totals.add(loss, logits, labels)
    t.channel.at(t.position.step, Place.MEETING)
    sums = totals.over_ranks()
    if not math.isfinite(sums.loss):
        raise NonFiniteLossError(f"the validation loss of epoch {t.position.epoch} is {sums.loss}")
    return sums


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
