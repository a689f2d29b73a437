"""Evaluation of the test images of a dataset, once at the end of a run, with the weights of its best epoch.

They choose nothing: neither the best epoch, nor an early stop, nor a learning rate. `loop` calls it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from engine.data.device import StreamingLoader
from engine.data.stream import BatchLoader
from engine.distributed.collectives import broadcast_tensors
from engine.distributed.watchdog import Phase
from engine.runs.checkpoint_files import DamagedCheckpointError
from engine.runs.events import FinalTest, WarningEvent
from engine.training.checkpoint import load_checkpoint
from engine.training.metrics import Evaluation
from engine.training.rank_state import HeldOutImages, RankState
from engine.training.trainer import Trainer
from engine.utils.errors import UsageError

MAX_THREADS = 8  # that decode images


@dataclass(frozen=True)
class PreparedTest:
    """The best model of a run and the type of its input, the epoch whose weights it has, and the test images."""

    model: tuple[nn.Module, torch.dtype]
    epoch: int
    images: HeldOutImages

    def event(self, evaluation: Evaluation, step: int) -> FinalTest:
        """Return the event of the result."""
        scores = evaluation.scores()
        return FinalTest(
            step=step,
            epoch=self.epoch,
            images=evaluation.metrics.images,
            skipped_images=evaluation.metrics.unread,
            loss=scores.loss,
            accuracy=scores.accuracy,
            top5=scores.top5,
            metrics=scores.metrics,
        )


def prepare_test(trainer: Trainer) -> PreparedTest | None:
    """Load the best model and start to load the test images; None without them or their model. A collective."""
    count, folder = trainer.source.num_images("test"), trainer.job.folder
    if not count or folder is None:
        return None
    state = trainer.state
    state.enter_phase(Phase.CHECKPOINT)
    # A copy: a requested checkpoint has the weights of the last step.
    model, epoch = deepcopy(state.ema.model if state.ema else state.model), torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        try:
            checkpoint = load_checkpoint(folder.checkpoints / "best.pt")
            model.load_state_dict(checkpoint["ema" if state.ema else "model"])
            epoch[0] = checkpoint["best_epoch"]
        except (DamagedCheckpointError, UsageError, RuntimeError) as error:
            message = f"the {count} test images were not evaluated: best.pt {error}"
            trainer.emit(WarningEvent(message=message, code="not-readable"))
    dist.broadcast(epoch, 0, group=state.cpu_group)
    if not epoch.item():
        return None
    broadcast_tensors([*model.parameters(), *model.buffers()])
    dtype = torch.float32 if state.ema else state.input_dtype
    return PreparedTest((model.eval(), dtype), int(epoch.item()), _load_images(trainer, state, count))


def _load_images(trainer: Trainer, state: RankState, count: int) -> HeldOutImages:
    # A finished training must not fail because of an image that it has not trained on.
    config = state.config.with_values(data={"on_bad": "skip"})
    requests = state.sampler.evaluation_requests("test", count)
    # Loader processes cannot be forked any more: this one has threads, and uses CUDA.
    threads = min(trainer.job.plan.cores_per_rank, MAX_THREADS)
    batches = BatchLoader(trainer.source, config, state.image_format, requests, workers=0, threads=threads)
    loader = StreamingLoader(batches, state.image_format, state.batch_device, state.memory_format)
    return HeldOutImages("test", count, loader)
