"""Train one epoch, evaluate: the loop, in the order in which it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from engine.data.pipelines.device import DeviceBatch
from engine.distributed.failures import NonFiniteLossError
from engine.distributed.watchdog import Place
from engine.models.freeze import set_training
from engine.models.precision import autocast, give_gradients, input_type, take_weights
from engine.optim.optimizers import set_lr, take_step
from engine.training.metrics import Evaluation, Sums, Tally
from engine.training.rank_state import Seen, Trainer

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
