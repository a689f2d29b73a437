"""The training loop: epochs and steps, in the order in which they run; and the learning rate range test.

Every rank runs this code on its own batches. `train` calls `training_loop` with a `Trainer`, whose parts do the work:
`data` has the batches, `model` what is trained, `log` what is measured, and `control` serves requests to checkpoint,
pause and stop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

from engine.base.errors import Problem
from engine.train.data.batch import DeviceBatch
from engine.train.distributed.failures import NonFiniteLossError
from engine.train.distributed.watchdog import Phase
from engine.train.loop.evaluation import evaluate, evaluate_test
from engine.train.loop.job import Outcome
from engine.train.loop.log import MicroBatchResult
from engine.train.loop.memory import manual_gc
from engine.train.loop.metrics import Metrics
from engine.train.loop.trainer import Trainer
from engine.train.optim.lr_range import LossCurve, LrRange


def training_loop(trainer: Trainer) -> Outcome:
    """Train and evaluate until the last epoch, an early stop, or until all ranks agree to stop."""
    data, model, log = trainer.data, trainer.model, trainer.log
    for epoch in range(data.position.epoch, trainer.config.run.epochs + 1):
        # Here, because a run that resumes from the checkpoint of its last epoch has nothing left to do, either.
        if log.early_stop.expired:
            break
        trainer.start_epoch()

        # 1. Train on every batch of the epoch, or on the rest of them after a resume.
        if not train_epoch(trainer):
            return "stopped"
        train_metrics = reduce_train_metrics(trainer)
        trainer.end_train_epoch()

        # 2. Evaluate. DDP averages gradients only, so the ranks' BatchNorm statistics differ until they are broadcast.
        trainer.emit_phase("validating")
        model.broadcast_buffers()
        evaluations = evaluate(trainer)
        if evaluations is None:
            return "stopped"

        # 3. Log, step schedule plateau, and write a checkpoint that resumes at the next epoch.
        evaluation, ema_evaluation = evaluations
        selected = ema_evaluation or evaluation  # EMA weights decide which checkpoint is the best
        monitored = trainer.monitored_value(selected)
        log.early_stop.step(monitored)
        trainer.log_epoch(train_metrics, evaluation, ema_evaluation)
        model.plateau.step(selected.metrics.loss if trainer.config.run.monitor == "auto" else monitored)
        is_best = trainer.save_evaluation(selected, monitored)
        trainer.begin_epoch(epoch + 1)
        trainer.save_epoch_checkpoint(epoch, best=is_best)

    # 4. Evaluate the test images once, if there are any. They have decided nothing.
    return "finished" if evaluate_test(trainer) else "stopped"


def train_epoch(trainer: Trainer) -> bool:
    """Train on the remaining steps of the epoch; return False if all ranks agreed to stop before its end."""
    trainer.model.train()
    steps_per_epoch = trainer.data.sampler.steps_per_epoch
    while trainer.data.position.step_in_epoch < steps_per_epoch:
        if trainer.control.handle_requests():
            return False
        train_step(trainer)
    return True


def train_step(trainer: Trainer) -> None:
    """Take one optimizer step on the next micro-batches of this rank."""
    data, model, log = trainer.data, trainer.model, trainer.log
    log.clock.begin_step(data.position.step + 1)

    # 1. Set the learning rate and reset the gradients.
    lr = model.begin_step(data.steps_seen() + 1)

    # 2. Accumulate gradients over the micro-batches; DDP all-reduces them once, in the last backward pass.
    results: list[MicroBatchResult] = []
    is_last = False
    while not is_last:
        batch = next_train_batch(trainer)
        is_last = batch.ends_step
        with nullcontext() if is_last else model.no_sync():
            results.append(forward_backward(trainer, batch, len(results)))
        # Frees its images before the next batch arrives.
        del batch

    # 3. Clip the gradients and step the optimizer, unless a loss or gradient is not finite.
    log.clock.begin("optimizer")
    grad_norm, nonfinite = model.step()

    # 4. Advance, update the EMA weights, and log the loss without reading it from the device.
    data.position.step += 1
    data.position.step_in_epoch += 1
    model.update_ema(data.position.step)
    log.clock.begin("other")
    log.add_step(results, nonfinite, {"grad_norm": grad_norm}, lr)
    log.clock.end_step()


def next_train_batch(trainer: Trainer) -> DeviceBatch:
    """Return the next training batch; time the wait for it, and count its unreadable images."""
    log = trainer.log
    log.clock.begin("data")
    log.enter_phase(Phase.DATA)
    batch = trainer.data.next_batch()
    if batch.unread:
        log.count_unread(batch.unread, log.train_metrics)
    log.clock.begin("forward")
    return batch


def forward_backward(trainer: Trainer, batch: DeviceBatch, index: int) -> MicroBatchResult:
    """Add the gradients of the step's `index`-th micro-batch (from 0) to those of the ones before it."""
    model, log = trainer.model, trainer.log
    log.enter_phase(Phase.FORWARD)
    images, targets = trainer.data.mix(batch, index)
    with model.autocast():
        logits = model.compute_logits(model.parallel, images)
        loss = model.criterion(logits, targets)
    log.clock.begin("backward")

    log.enter_phase(Phase.BACKWARD)
    # With these weights, the sum over micro-batches and mean over ranks is the mean over all images of the step. If the
    # loss is not finite, `loss * 0` is NaN, and so is the gradient: the all-reduce shows it to every rank. Multiplied
    # instead of passed as `backward(gradient=...)`, which imports sympy.
    weighted_loss = loss * (loss.detach() * 0).add_(batch.loss_weight)
    with model.keep_buffers():
        model.scaler.scale(weighted_loss).backward()

    # Counted here, because a CUDA graph overwrites the logits with those of the next micro-batch.
    correct = model.task.count_correct(logits.detach(), batch.labels)
    return MicroBatchResult(loss.detach(), correct, len(batch.labels), batch.loss_weight)


def reduce_train_metrics(trainer: Trainer) -> Metrics:
    """Sum the training metrics of the epoch over all ranks. Raises NonFiniteLossError. A collective."""
    trainer.log.enter_phase(Phase.REDUCE_METRICS)
    trainer.log.check()
    metrics = trainer.log.train_metrics.all_reduce()
    if not math.isfinite(metrics.loss):
        epoch = trainer.data.position.epoch
        raise NonFiniteLossError(
            f"every step of epoch {epoch} was skipped because the loss is not finite; lower optim.lr"
        )
    return metrics


def run_range_test(trainer: Trainer, lr_range: LrRange, warnings: Sequence[Problem]) -> Outcome:
    """Train with the learning rates of `lr_range` until its end, until the loss diverges or all ranks agree to stop.

    `warnings` are emitted before the first step. The owner of the ranks draws the losses of the `step` events; nothing
    is saved.
    """
    data, curve = trainer.data, LossCurve(lr_range)
    trainer.start_run(warnings)
    trainer.model.train()
    with manual_gc():
        for _ in range(lr_range.steps):
            if trainer.control.handle_requests():
                return "stopped"
            if data.position.step_in_epoch == data.sampler.steps_per_epoch:
                trainer.begin_epoch(data.position.epoch + 1)
            train_step(trainer)
            # The same loss on all ranks, so all of them end at the same step. A host sync.
            try:
                [loss] = trainer.log.wait_pending()
            except NonFiniteLossError:
                loss = math.inf
            if curve.add(loss if math.isfinite(loss) else math.inf):
                break
        trainer.control.end_run("finished")
    return "finished"
