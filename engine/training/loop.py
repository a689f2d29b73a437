"""The training loop: epochs, steps and evaluations, in the order in which they run.

Every rank runs this code on its own batches. `train` calls `training_loop`. `trainer` handles clocks, journal events,
files, and requests to checkpoint, pause or stop. `rank_state` holds the model, the optimizer and the position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from engine.data.batch import DeviceBatch
from engine.distributed.failures import NonFiniteLossError
from engine.distributed.parallel import evaluation_model
from engine.distributed.watchdog import Phase
from engine.models.freeze import set_train_mode
from engine.models.precision import autocast
from engine.models.tta import augmented_logits
from engine.optim.optimizers import optimizer_step, set_lr
from engine.training.final_test import prepare_test
from engine.training.job import Outcome
from engine.training.metrics import Evaluation, EvaluationAccumulator, Metrics
from engine.training.rank_state import HeldOutImages, MicroBatchResult, RankState
from engine.training.trainer import Trainer

# Called by every rank before each training step and before each validation batch that all ranks have: writes requested
# checkpoints and waits while the run is paused. Returns True if all ranks agreed to stop.
RequestHandler = Callable[[], bool]


def training_loop(trainer: Trainer) -> Outcome:
    """Train and evaluate until the last epoch, an early stop, or until all ranks agree to stop."""
    state = trainer.state
    for epoch in range(state.position.epoch, state.config.run.epochs + 1):
        # Here, because a run that resumes from the checkpoint of its last epoch has nothing left to do, either.
        if state.early_stop.expired:
            break
        trainer.start_epoch()

        # 1. Train on every batch of the epoch, or on the rest of them after a resume.
        if not train_epoch(state, trainer.handle_requests):
            return "stopped"
        train_metrics = reduce_train_metrics(state)
        trainer.record_train_time()

        # 2. Evaluate. DDP averages gradients only, so the ranks' BatchNorm statistics differ until they are broadcast.
        trainer.emit_phase("validating")
        state.broadcast_buffers()
        evaluations = evaluate(state, trainer.handle_requests)
        if evaluations is None:
            return "stopped"

        # 3. Log, step schedule plateau, and write a checkpoint that resumes at the next epoch.
        evaluation, ema_evaluation = evaluations
        selected = ema_evaluation or evaluation  # EMA weights decide which checkpoint is the best
        state.early_stop.step(selected.metrics.accuracy)
        trainer.log_epoch(train_metrics, evaluation, ema_evaluation)
        state.plateau.step(selected.metrics.loss)
        is_best = trainer.save_evaluation(selected)
        state.start_epoch(epoch + 1)
        trainer.save_epoch_checkpoint(epoch, best=is_best)

    # 4. Evaluate the test images once, if there are any. They have decided nothing.
    if (test := prepare_test(trainer)) is not None:
        trainer.emit_phase("testing")
        tested = evaluate_models(state, [test.model], test.images, trainer.handle_requests)
        if tested is None:
            return "stopped"
        trainer.emit(test.event(tested[0], state.position.step))
    return "finished"


def train_epoch(state: RankState, handle_requests: RequestHandler) -> bool:
    """Train on the remaining steps of the epoch; return False if all ranks agreed to stop before its end."""
    set_train_mode(state.model, state.network.frozen)
    while state.position.step_in_epoch < state.sampler.steps_per_epoch:
        if handle_requests():
            return False
        train_step(state)
    return True


def train_step(state: RankState) -> None:
    """Take one optimizer step on the next micro-batches of this rank."""
    marks = state.timer.marks
    if marks is not None:
        marks.begin_step(state.position.step + 1)

    # 1. Set the learning rate and reset the gradients.
    lr = state.lr_at(state.position.step_in_epoch + 1)
    set_lr(state.optimizer, lr)
    state.zero_grad()
    buffers = state.snapshot_buffers()

    # 2. Accumulate gradients over the micro-batches; DDP all-reduces them once, in the last backward pass.
    results: list[MicroBatchResult] = []
    is_last = False
    while not is_last:
        batch = state.next_train_batch()
        is_last = batch.ends_step
        with nullcontext() if is_last else state.no_sync():
            results.append(forward_backward(state, batch, len(results)))
        # Frees its images before the next batch arrives.
        del batch

    # 3. Unscale and clip the gradients.
    if marks is not None:
        marks.begin("optimizer")
    state.copy_grads_to_master()
    grad_norm = clip_gradients(state)

    # 4. Step the optimizer. A step with a non-finite loss or gradient on any rank is skipped: the all-reduced gradient
    # is identical on every rank, so all ranks skip the same step. GradScaler and fused optimizers skip on the device.
    # `< inf` is also False for NaN, and launches a quarter of the kernels of `isfinite`.
    nonfinite = (grad_norm < math.inf).logical_not_()
    if state.scaler.is_enabled():
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        optimizer_step(state.optimizer, nonfinite, may_skip=state.skips_nonfinite)
    state.copy_master_to_model()
    # The forward pass has already added the non-finite values to BatchNorm's running statistics.
    state.restore_buffers(buffers, nonfinite)

    # 5. Advance, update the EMA weights, and log the loss without reading it from the device.
    state.position.step += 1
    state.position.step_in_epoch += 1
    if state.ema is not None:
        state.ema.update(state.network.optimized_model, state.position.step)
    if marks is not None:
        marks.begin("other")
    state.log_step(results, nonfinite, {"grad_norm": grad_norm}, lr)
    if marks is not None:
        marks.end_step()


def forward_backward(state: RankState, batch: DeviceBatch, index: int) -> MicroBatchResult:
    """Add the gradients of the step's `index`-th micro-batch (from 0) to those of the ones before it."""
    state.enter_phase(Phase.FORWARD)
    images, targets = state.mix(batch, index)
    with autocast(state.config.precision, state.device):
        logits = state.compute_logits(state.parallel_model, images, state.input_dtype)
        loss = state.criterion(logits, targets)
    state.timer.end_forward()

    state.enter_phase(Phase.BACKWARD)
    # With these weights, the sum over micro-batches and mean over ranks is the mean over all images of the step. If the
    # loss is not finite, `loss * 0` is NaN, and so is the gradient: the all-reduce shows it to every rank. Multiplied
    # instead of passed as `backward(gradient=...)`, which imports sympy.
    weighted_loss = loss * (loss.detach() * 0).add_(batch.loss_weight)
    state.scaler.scale(weighted_loss).backward()

    # Counted here, because a CUDA graph overwrites the logits with those of the next micro-batch.
    correct = (logits.detach().argmax(1) == batch.labels).sum()
    return MicroBatchResult(loss.detach(), correct, len(batch.labels), batch.loss_weight)


def clip_gradients(state: RankState) -> Tensor:
    """Clip the gradients as configured; return their total norm before clipping, on the device.

    Without clipping, the gradients stay multiplied by the loss scale.
    """
    optim = state.config.optim
    clips = optim.clip_value > 0 or optim.clip_norm > 0
    if clips:
        state.scaler.unscale_(state.optimizer)
    parameters = [p for group in state.optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [cast(Tensor, p.grad) for p in parameters]
    norm = norm_to_clip = total_norm(gradients)
    if optim.clip_value > 0:
        clip_grad_value_(parameters, optim.clip_value)
    if optim.clip_norm > 0:
        if optim.clip_value > 0 or optim.clip_norm_type != 2:
            norm_to_clip = total_norm(gradients, float(optim.clip_norm_type))
        clip_grads_with_norm_(parameters, optim.clip_norm, norm_to_clip)
    if state.scaler.is_enabled() and not clips:
        # `scale` multiplies on the device; `get_scale` would be a host sync.
        norm = norm / state.scaler.scale(torch.ones_like(norm))
    return norm


def total_norm(gradients: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients together, in float32: in float16 that of finite gradients may overflow.

    Same as `torch.nn.utils.get_total_norm`, but without grouping by type and device, and with one call on the CPU too.
    """
    float_gradients = [grad.float() if grad.dtype == torch.float16 else grad for grad in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(float_gradients, norm_type)), norm_type)
    return norm


def reduce_train_metrics(state: RankState) -> Metrics:
    """Sum the training metrics of the epoch over all ranks. Raises NonFiniteLossError. A collective."""
    state.enter_phase(Phase.REDUCE_METRICS)
    state.check_step_log()
    metrics = state.train_metrics.all_reduce()
    if not math.isfinite(metrics.loss):
        raise NonFiniteLossError(
            f"every step of epoch {state.position.epoch} was skipped because the loss is not finite; lower optim.lr",
        )
    return metrics


@torch.no_grad()
def evaluate(state: RankState, handle_requests: RequestHandler) -> tuple[Evaluation, Evaluation | None] | None:
    """Evaluate the model, and the EMA weights if there are any, on every validation image exactly once.

    Return None if all ranks agreed to stop. Raises NonFiniteLossError on all ranks. A collective.
    """
    models = [(state.model.eval(), state.input_dtype)]
    if state.ema is not None:
        state.ema.copy_buffers(state.model)
        models.append((state.ema.model, torch.float32))
    images = HeldOutImages("val", state.sampler.val_images, state.batches)
    evaluations = evaluate_models(state, models, images, handle_requests)
    return None if evaluations is None else (evaluations[0], evaluations[1] if state.ema is not None else None)


@torch.no_grad()
def evaluate_models(
    state: RankState,
    models: Sequence[tuple[nn.Module, torch.dtype]],
    images: HeldOutImages,
    handle_requests: RequestHandler,
) -> list[Evaluation] | None:
    """Evaluate models, each with the type of its input, on every one of the images exactly once.

    Return None if all ranks agreed to stop. Raises NonFiniteLossError on all ranks. A collective.
    """
    models = [(evaluation_model(model, state.parallel_model), dtype) for model, dtype in models]
    probabilities = state.own_metrics.probabilities if state.own_metrics else None
    accumulators = [EvaluationAccumulator(state.device, state.num_classes, probabilities) for _ in models]

    # Ranks may differ by one batch, and can only agree to stop at a batch that all of them have.
    common_batches = images.num_images // state.sampler.world_size // state.sampler.batch_size
    for index, _ in enumerate(state.sampler.evaluation_requests(images.part, images.num_images)):
        if index < common_batches and handle_requests():
            return None
        batch = state.next_batch(accumulators[0].totals, images.batches)
        state.enter_phase(Phase.EVALUATION)
        for (model, dtype), accumulator in zip(models, accumulators, strict=True):
            with autocast(state.config.precision, state.device):
                forward = partial(state.compute_logits, model, dtype=dtype)
                logits = augmented_logits(forward, batch.images, state.config.eval)
                loss = state.validation_loss(logits, batch.labels)
            if batch.loss_weight > 0:
                accumulator.add(loss, logits, batch.labels)

    state.enter_phase(Phase.REDUCE_METRICS)
    evaluations = [accumulator.all_reduce() for accumulator in accumulators]
    mean_loss = evaluations[0].metrics.loss
    if not math.isfinite(mean_loss) and images.part == "val":
        raise NonFiniteLossError(f"the validation loss of epoch {state.position.epoch} is {mean_loss}")
    if state.own_metrics:
        evaluations = [
            replace(evaluation, own=state.compute_own_metrics(accumulator.outputs))
            for evaluation, accumulator in zip(evaluations, accumulators, strict=True)
        ]
    return evaluations
