"""Train one epoch, evaluate: the loop, in the order in which it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from engine.agreement import Agreement
from engine.channel import Channel
from engine.config import Config
from engine.data.loader import Batch
from engine.data.sampler import Shares
from engine.data.source import ImageFormat
from engine.data.transforms import normalise
from engine.precision import autocast
from engine.schedule import lr_factor, scaled_lr
from engine.steplog import NonFiniteLossError, StepLog


@dataclass
class Position:
    """`batch` batches of `epoch` (from 1) are done, `step` steps in all, of which the scaler left out `skipped`."""

    epoch: int = 1
    batch: int = 0
    step: int = 0
    skipped: int = 0


@dataclass
class Totals:
    """A rank's running sums over images, on its device until they are asked for."""

    device: torch.device
    loss: Tensor = field(init=False)
    counts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=self.device)

    def add(self, mean_loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self.loss += mean_loss.detach().double() * len(labels)
        self.counts[0] += (logits.detach().argmax(1) == labels).sum()
        self.counts[1] += len(labels)

    def over_ranks(self) -> tuple[float, float, int]:
        """Mean loss, accuracy and number of images over all ranks. A collective."""
        loss, counts = self.loss.clone(), self.counts.clone()
        dist.all_reduce(loss)
        dist.all_reduce(counts)
        correct, images = (int(value) for value in counts.tolist())
        return loss.item() / images, correct / images, images


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
    batches: Iterator[Batch]
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

    def next_batch(self) -> tuple[Tensor, Tensor, float]:
        """Normalised images, labels and weight of the next batch, on the device."""
        batch = next(self.batches)
        images, labels = batch.images, batch.labels
        if self.device.type == "cuda":
            images, labels = images.pin_memory(), labels.pin_memory()
        images = normalise(images.to(self.device, non_blocking=True), self._mean, self._std)
        return images, labels.to(self.device, non_blocking=True), batch.weight

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
        images, labels, weight = t.next_batch()
        t.log.waited(time.perf_counter() - waiting)
        train_step(t, images, labels, weight)
    return True


def train_step(t: Trainer, images: Tensor, labels: Tensor, weight: float) -> None:
    """One optimizer step on one batch of each rank."""
    lr = t.lr(t.position.epoch, t.position.batch + 1)
    for group in t.optimizer.param_groups:
        group["lr"] = lr

    with autocast(t.config.precision, t.device):
        logits = t.ddp(images)
        loss = F.cross_entropy(logits, labels)
    t.optimizer.zero_grad(set_to_none=True)
    t.scaler.scale(loss * weight).backward()
    scale = t.scaler.get_scale() if t.scaler.is_enabled() else 1.0
    t.scaler.step(t.optimizer)
    t.scaler.update()
    if t.scaler.is_enabled() and t.scaler.get_scale() < scale:
        t.position.skipped += 1

    t.position.step += 1
    t.position.batch += 1
    if weight > 0:
        t.totals.add(loss, logits, labels)
    t.log.add(loss.detach() * weight, t.position.step, t.position.epoch, lr)


def evaluate(t: Trainer, attend: Attend) -> tuple[float, float] | None:
    """Mean loss and accuracy over all validation images, each counted once; None where all ranks agreed to stop.
    Raises NonFiniteLossError, on all ranks alike."""
    t.model.eval()
    totals = Totals(t.device)
    # Ranks may differ by one batch; they can only agree on stopping while all of them have one.
    shared = t.shares.val_images // t.shares.world_size // t.shares.batch_size
    with torch.no_grad():
        for number, _ in enumerate(t.shares.val()):
            if number < shared and attend():
                return None
            images, labels, _ = t.next_batch()
            with autocast(t.config.precision, t.device):
                logits = t.model(images)
                loss = F.cross_entropy(logits, labels)
            totals.add(loss, logits, labels)
    mean_loss, accuracy, _ = totals.over_ranks()
    if not math.isfinite(mean_loss):
        raise NonFiniteLossError(f"the validation loss of epoch {t.position.epoch} is {mean_loss}")
    return mean_loss, accuracy


def share_buffers(model: nn.Module) -> None:
    """Give every rank the running statistics of rank 0. A collective."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def finish_training(t: Trainer) -> tuple[float, float]:
    """Mean loss and accuracy of the epoch that was trained. Raises NonFiniteLossError. A collective."""
    t.log.settle()
    loss, accuracy, _ = t.totals.over_ranks()
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the training loss of epoch {t.position.epoch} is {loss}")
    return loss, accuracy
