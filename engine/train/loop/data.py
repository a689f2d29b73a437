"""The images of one rank: its input pipeline, the batches in their order, and how far training has come in them.

`trainer` builds `TrainingData`. `loop` takes a batch from it and moves its `position`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from engine.base.answers import Answer
from engine.train.data.augment.mixup import build_mixer
from engine.train.data.batch import DeviceBatch, DeviceLoader
from engine.train.data.device import InputPipeline
from engine.train.data.plan import InputPlan, plan_input
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.data.sources.base import ImageSource, UnreadableImageError
from engine.train.data.sources.formats import model_input_format
from engine.train.distributed.messages import decide_on_rank_0
from engine.train.distributed.parallel import batch_device
from engine.train.distributed.rank_env import RankInfo
from engine.train.loop.job import Job

# More consecutive batches without a readable image mean a broken disk or mount, not broken images.
MAX_UNREADABLE_BATCHES = 10


@dataclass
class Position:
    """Progress of training: `step_in_epoch` steps of `epoch` (from 1) are done, `step` steps in all."""

    epoch: int = 1
    step_in_epoch: int = 0
    step: int = 0


def resume_position(checkpoint: dict[str, Any] | None, sampler: DistributedBatchSampler) -> Position:
    """Return the position to resume at, or the start of training without a checkpoint.

    After a change of the global batch size this is the first step without an image that the epoch has already used.
    """
    if not checkpoint:
        return Position()
    steps_done = -(-checkpoint["step_in_epoch"] * checkpoint["global_batch"] // sampler.global_batch)
    return Position(checkpoint["epoch"], min(steps_done, sampler.steps_per_epoch), checkpoint["step"])


class TrainingData:
    """The batches of one rank on its device, in the order of training and evaluation."""

    def __init__(
        self,
        job: Job,
        sampler: DistributedBatchSampler,
        pipeline: InputPipeline,
        device: torch.device,
        memory_format: torch.memory_format,
        position: Position,
    ) -> None:
        self.sampler, self.pipeline, self.position = sampler, pipeline, position
        self.source, self.image_format = pipeline.source, pipeline.image_format
        self.num_classes = len(self.source.classes)
        self.batch_device = batch_device(job.config.device, device)
        self.batches = pipeline.device_loader(self.batch_device, memory_format)
        self._device, self._mixer = device, build_mixer(job.config, self.num_classes)
        self._consecutive_unreadable = 0

    def start_epoch(self, epoch: int) -> None:
        """Move to the first step of an epoch."""
        self.position.epoch, self.position.step_in_epoch = epoch, 0

    def steps_seen(self) -> int:
        """Return the steps in the data of all epochs so far, which skipped steps and resumes do not shift."""
        return (self.position.epoch - 1) * self.sampler.steps_per_epoch + self.position.step_in_epoch

    def next_batch(self, batches: DeviceLoader | None = None) -> DeviceBatch:
        """Return the next batch, of other `batches` if given, with its labels on the device.

        Raises UnreadableImageError after too many batches without a readable image.
        """
        batch = next(batches or self.batches)
        is_empty = batch.unread and batch.loss_weight == 0
        self._consecutive_unreadable = self._consecutive_unreadable + 1 if is_empty else 0
        if self._consecutive_unreadable > MAX_UNREADABLE_BATCHES:
            raise UnreadableImageError(
                f"no readable image in {self._consecutive_unreadable} consecutive batches: {batch.unread[0]}"
            )
        return replace(batch, labels=batch.labels.to(self._device))

    def mix(self, batch: DeviceBatch, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return images and targets after mixup or cutmix; without them the batch's own images and labels."""
        if self._mixer is None:
            return batch.images, batch.labels
        batch_index = self.position.step_in_epoch * self.sampler.accumulate + micro_batch
        return self._mixer(batch.images, batch.labels, self.position.epoch, batch_index, self.sampler.rank)


def start_pipeline(
    job: Job,
    source: ImageSource,
    sampler: DistributedBatchSampler,
    position: Position,
    rank_info: RankInfo,
    store: Store,
) -> InputPipeline:
    """Start to load the batches from a position on, as rank 0 plans it: free memory and libraries differ between the
    ranks. A collective on the store."""
    config, plan = job.config, job.plan

    def decide() -> InputPlan:
        return plan_input(
            config,
            source,
            next(sampler.train_requests(1)),
            local_world_size=plan.local_world_size,
            cores_per_rank=plan.cores_per_rank,
            uses_nccl=plan.uses_nccl,
        )

    input_plan = decide_on_rank_0("pipeline", decide, Answer[InputPlan], rank_info, store)
    if job.lr_range is not None:
        requests = sampler.repeated_train_requests(job.lr_range.steps)
    else:
        requests = sampler.requests(config.run.epochs, position.epoch, position.step_in_epoch)
    image_format = model_input_format(config, source)
    return InputPipeline(input_plan, source, config, image_format, requests, plan.devices_per_rank)
