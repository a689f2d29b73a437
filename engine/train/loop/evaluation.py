"""Evaluation of the model on the validation images after each epoch, and on the test images once at the end of a run.

The test images choose nothing: neither the best epoch, nor an early stop, nor a learning rate. `loop` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from engine.base.errors import UsageError
from engine.runs.checkpoint_files import DamagedCheckpointError
from engine.runs.events import FinalTest, WarningEvent
from engine.train.data.batch import DeviceLoader
from engine.train.data.device import stream_to_device
from engine.train.data.sampler import Part
from engine.train.data.stream import BatchLoader
from engine.train.distributed.collectives import broadcast_tensors
from engine.train.distributed.failures import NonFiniteLossError
from engine.train.distributed.parallel import evaluation_model
from engine.train.distributed.watchdog import Phase
from engine.train.loop.checkpoint import load_checkpoint
from engine.train.loop.metrics import Evaluation
from engine.train.loop.trainer import Trainer
from engine.train.models.tta import augmented_logits

MAX_THREADS = 8  # that decode test images


@torch.no_grad()
def evaluate(trainer: Trainer) -> tuple[Evaluation, Evaluation | None] | None:
    """Evaluate the model, and the EMA weights if there are any, on every validation image exactly once.

    Return None if all ranks agreed to stop. Raises NonFiniteLossError on all ranks. A collective.
    """
    model, data = trainer.model, trainer.data
    networks = [(model.network.eval(), model.input_dtype)]
    if model.ema is not None:
        model.ema.copy_buffers(model.network)
        networks.append((model.ema.network, torch.float32))
    evaluations = evaluate_networks(trainer, networks, "val", data.sampler.val_images, data.batches)
    return None if evaluations is None else (evaluations[0], evaluations[1] if model.ema is not None else None)


@torch.no_grad()
def evaluate_networks(
    trainer: Trainer,
    networks: Sequence[tuple[nn.Module, torch.dtype]],
    part: Part,
    num_images: int,
    batches: DeviceLoader,
) -> list[Evaluation] | None:
    """Evaluate networks, each with the type of its input, on every image of a part exactly once.

    `num_images` is their number over all ranks, and `batches` are those of this rank. Return None if all ranks agreed
    to stop. Raises NonFiniteLossError on all ranks. A collective.
    """
    model, data, log, control = trainer.model, trainer.data, trainer.log, trainer.control
    networks = [(evaluation_model(network, model.parallel), dtype) for network, dtype in networks]
    own = trainer.own_metrics
    accumulators = [model.task.accumulator(keeps_outputs=bool(own)) for _ in networks]

    # Ranks may differ by one batch, and can only agree to stop at a batch that all of them have.
    common_batches = num_images // data.sampler.world_size // data.sampler.batch_size
    for index, _ in enumerate(data.sampler.evaluation_requests(part, num_images)):
        if index < common_batches and control.handle_requests():
            return None
        log.enter_phase(Phase.DATA)
        batch = data.next_batch(batches)
        if batch.unread:
            log.count_unread(batch.unread, accumulators[0].totals)
        log.enter_phase(Phase.EVALUATION)
        for (network, dtype), accumulator in zip(networks, accumulators, strict=True):
            with model.autocast():
                forward = partial(model.compute_logits, network, dtype=dtype)
                logits = augmented_logits(forward, batch.images, trainer.config.eval)
                loss = model.validation_loss(logits, batch.labels)
            if batch.loss_weight > 0:
                accumulator.add(loss, logits, batch.labels)

    log.enter_phase(Phase.REDUCE_METRICS)
    evaluations = [accumulator.all_reduce() for accumulator in accumulators]
    mean_loss = evaluations[0].metrics.loss
    if not math.isfinite(mean_loss) and part == "val":
        reason = f"the validation loss of epoch {data.position.epoch} is {mean_loss}"
        raise NonFiniteLossError(f"{reason}; lower optim.lr")
    return [
        own.add_to(each, accumulator.outputs, log.warn, selects=part == "val", cpu_group=trainer.cpu_group)
        for each, accumulator in zip(evaluations, accumulators, strict=True)
    ]


def evaluate_test(trainer: Trainer) -> bool:
    """Evaluate the test images with the best network, if there are any; return False if all ranks agreed to stop. A
    collective."""
    data, folder, model = trainer.data, trainer.job.folder, trainer.model
    count = data.source.num_images("test")
    if not count or folder is None:
        return True
    trainer.log.enter_phase(Phase.CHECKPOINT)
    # A copy: a requested checkpoint has the weights of the last step.
    network = deepcopy(model.ema.network if model.ema else model.network)
    epoch = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        try:
            checkpoint = load_checkpoint(folder.checkpoints / "best.pt")
            network.load_state_dict(checkpoint["ema" if model.ema else "model"])
            model.task.load_state(checkpoint.get("task", {}))
            epoch[0] = checkpoint["best_epoch"]
        except (DamagedCheckpointError, UsageError, RuntimeError) as error:
            message = f"the {count} test images were not evaluated: best.pt {error}"
            trainer.log.emit(WarningEvent(message=message, code="not-readable"))
    dist.broadcast(epoch, 0, group=trainer.cpu_group)
    if not epoch.item():
        return True
    broadcast_tensors([*network.parameters(), *network.buffers()])
    batches = _load_test_images(trainer, count)
    trainer.emit_phase("testing")
    dtype = torch.float32 if model.ema else model.input_dtype
    evaluations = evaluate_networks(trainer, [(network.eval(), dtype)], "test", count, batches)
    if evaluations is None:
        return False
    metrics, scores = evaluations[0].metrics, evaluations[0].scores()
    trainer.log.emit(
        FinalTest(
            step=data.position.step,
            epoch=int(epoch.item()),
            images=metrics.images,
            skipped_images=metrics.unread,
            loss=scores.loss,
            accuracy=scores.accuracy,
            top5=scores.top5,
            metrics=scores.metrics,
        )
    )
    return True


def _load_test_images(trainer: Trainer, count: int) -> DeviceLoader:
    # A finished training must not fail because of an image that it has not trained on.
    config, data = trainer.config.with_values(data={"on_bad": "skip"}), trainer.data
    requests = data.sampler.evaluation_requests("test", count)
    # Loader processes cannot be forked any more: this one has threads, and uses CUDA.
    threads = min(trainer.job.plan.cores_per_rank, MAX_THREADS)
    batches = BatchLoader(data.source, config, data.image_format, requests, workers=0, threads=threads)
    return stream_to_device(batches, data.image_format, data.batch_device, trainer.model.memory_format)
