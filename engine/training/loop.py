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
from engine.distributed.watchdog import Phase
from engine.models.freeze import set_train_mode
from engine.models.precision import autocast, input_dtype, master_params_to_model_params, model_grads_to_master_grads
from engine.optim.optimizers import optimizer_step, set_lr
from engine.training.metrics import Evaluation, EvaluationAccumulator, Metrics
from engine.training.rank_state import BatchResult, RankState

# Called by every rank between two steps; returns True where all ranks agreed to stop.
RequestHandler = Callable[[], bool]


def train_epoch(state: RankState, handle_requests: RequestHandler) -> bool:
    """Train from the position to the end of its epoch; False where all ranks agreed to stop on the way."""
    set_train_mode(state.model, state.frozen_modules)
    state.step_log.restart_clock()
    while state.position.batch < state.sampler.steps_per_epoch:
        if handle_requests():
            return False
        train_step(state)
    return True


def train_step(state: RankState) -> None:
    """One optimizer step on the next batches of each rank. Where a loss or a gradient is not finite on any rank, all
    ranks skip the step: the all-reduced gradient is identical on every rank, so no host sync is needed to agree."""
    lr = state.lr(state.position.epoch, state.position.batch + 1)
    set_lr(state.optimizer, lr)
    before = state.snapshot_buffers()
    state.zero_grad()
    results: list[BatchResult] = []
    ends_step = False
    while not ends_step:
        state.timer.start_data_wait()
        batch = state.next_batch(state.totals)
        state.step_log.add_data_wait(state.timer.end_data_wait())
        ends_step = batch.ends_step
        with nullcontext() if ends_step else state.no_sync():
            results.append(forward_backward(state, batch, len(results)))
        # Its images make room for those of the next.
        del batch

    if state.master is not None:
        model_grads_to_master_grads(state.model, state.master)
    nonfinite = clip_gradients(state)
    if state.scaler.is_enabled():
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        optimizer_step(state.optimizer, nonfinite, may_skip=state.config.optim.nonfinite == "skip")
    if state.master is not None:
        master_params_to_model_params(state.model, state.master)
    state.restore_buffers(before, nonfinite)

    state.position.step += 1
    state.position.batch += 1
    if state.ema is not None:
        state.ema.update(state.trained_model, state.position.step)
    for result in results:
        if result.weight > 0:
            state.totals.add(result.loss, result.correct, result.num_images, nonfinite)
    step_loss = results[0].loss * results[0].weight
    for result in results[1:]:
        step_loss += result.loss * result.weight
    state.step_log.add(step_loss, nonfinite, state.position.step, state.position.epoch, lr)


def forward_backward(state: RankState, batch: DeviceBatch, micro_batch: int) -> BatchResult:
    """Adds a batch, the step's `micro_batch`-th from 0, to the gradients."""
    state.channel.enter_phase(state.position.step, Phase.FORWARD)
    images, targets = batch.images, batch.labels
    if state.mixer.enabled:
        batch_index = state.position.batch * state.sampler.accumulate + micro_batch
        images, targets = state.mixer(images, targets, state.position.epoch, batch_index, state.sampler.rank)
    with autocast(state.config.precision, state.device):
        logits = state.compute_logits(state.wrapped, images, input_dtype(state.config.precision))
        loss = state.criterion(logits, targets)
    state.timer.end_forward()
    state.channel.enter_phase(state.position.step, Phase.BACKWARD)
    # A loss that is not finite takes the gradient along, also where that would have stayed finite.
    # Not as an argument of `backward`, for which torch imports sympy.
    weighed = loss * (loss.detach() * 0).add_(batch.loss_weight)
    (state.scaler.scale(weighed) if state.scaler.is_enabled() else weighed).backward()
    # Now: a CUDA graph writes the logits of the next batch over these.
    right = (logits.detach().argmax(1) == batch.labels).sum()
    return BatchResult(loss.detach(), right, len(batch.labels), batch.loss_weight)


def clip_gradients(state: RankState) -> Tensor:
    """Clip what is to be clipped; whether a gradient is not finite, on the device."""
    optim = state.config.optim
    clips = optim.clip_norm > 0 or optim.clip_value > 0
    if clips and state.scaler.is_enabled():
        state.scaler.unscale_(state.optimizer)
    parameters = [one for group in state.optimizer.param_groups for one in group["params"] if one.grad is not None]
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


def evaluate(state: RankState, handle_requests: RequestHandler) -> tuple[Evaluation, Evaluation | None] | None:
    """What the model makes of all validation images, each counted once, and what the averaged weights make of them
    where there are such; None where all ranks agreed to stop. Raises NonFiniteLossError, on all ranks alike."""
    models = [state.model.eval()]
    if state.ema is not None:
        state.ema.copy_buffers(state.model)
        models.append(state.ema.model)
    tallies = [EvaluationAccumulator(state.device, state.num_classes) for _ in models]
    types = [input_dtype(state.config.precision), torch.float32]
    # Ranks may differ by one batch; they can only agree on stopping while all of them have one.
    shared = state.sampler.val_images // state.sampler.world_size // state.sampler.batch_size
    with torch.no_grad():
        for number, _ in enumerate(state.sampler.val_requests()):
            if number < shared and handle_requests():
                return None
            batch = state.next_batch(tallies[0].totals)
            state.channel.enter_phase(state.position.step, Phase.EVALUATION)
            for model, tally, type_ in zip(models, tallies, types, strict=False):
                with autocast(state.config.precision, state.device):
                    logits = state.compute_logits(model, batch.images, type_)
                    loss = state.criterion(logits, batch.labels)
                if batch.loss_weight > 0:
                    tally.add(loss, logits, batch.labels)
    state.channel.enter_phase(state.position.step, Phase.REDUCE_METRICS)
    found = [tally.all_reduce() for tally in tallies]
    if not math.isfinite(found[0].metrics.loss):
        raise NonFiniteLossError(f"the validation loss of epoch {state.position.epoch} is {found[0].metrics.loss}")
    return found[0], found[1] if state.ema is not None else None


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank the running statistics of rank 0. A collective."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def finish_train_epoch(state: RankState) -> Metrics:
    """Sums over the images of the epoch that was trained. Raises NonFiniteLossError. A collective."""
    epoch = state.position.epoch
    state.channel.enter_phase(state.position.step, Phase.REDUCE_METRICS)
    state.step_log.wait_pending()
    state.step_log.check_unreported(state.position.step, epoch, state.lr(epoch, state.position.batch))
    sums = state.totals.all_reduce()
    if not math.isfinite(sums.loss):
        raise NonFiniteLossError(f"no step of epoch {epoch} could be taken: the losses are not finite; lower optim.lr")
    return sums
