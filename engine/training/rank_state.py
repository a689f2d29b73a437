"""What a rank holds while it trains: model, optimizer, input pipeline, position and logs.

`train` builds it, `loop` trains with it, `state_dict` saves and restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from engine.data.augment.mixup import build_mixer
from engine.data.batch import DeviceBatch, DeviceLoader
from engine.data.device import InputPipeline
from engine.data.sampler import DistributedBatchSampler, Part
from engine.data.sources.base import UnreadableImageError
from engine.distributed.agreement import Agreement
from engine.distributed.channel import Channel
from engine.distributed.collectives import broadcast_tensors
from engine.distributed.parallel import batch_device
from engine.distributed.rank_env import RankInfo
from engine.distributed.watchdog import Phase
from engine.models.compile import eager_for_partial_batch
from engine.models.memory_format import resolve_memory_format
from engine.models.precision import (
    build_grad_scaler,
    input_dtype,
    master_params_to_model_params,
    model_grads_to_master_grads,
    tf32_is_on,
)
from engine.models.training_model import TrainingModel
from engine.optim.plateau import PlateauFactor
from engine.runs.early_stop import EarlyStop
from engine.runs.events import WarningEvent
from engine.training.job import Job
from engine.training.losses import Criterion, build_validation_loss
from engine.training.metrics import MetricAccumulator
from engine.training.own_metrics import Outputs, OwnMetrics, gather_outputs
from engine.training.step_log import SkippedSteps, StepLog
from engine.training.timing import PhaseTimer

# More consecutive batches without a readable image mean a broken disk or mount, not broken images.
MAX_UNREADABLE_BATCHES = 10


@dataclass
class Position:
    """Progress of training: `step_in_epoch` steps of `epoch` (from 1) are done, `step` steps in all."""

    epoch: int = 1
    step_in_epoch: int = 0
    step: int = 0


class MicroBatchResult(NamedTuple):
    """Mean loss and number of correct predictions of a micro-batch, both on the device; `weight` is its loss weight."""

    loss: Tensor
    correct: Tensor
    num_images: int
    weight: float


class HeldOutImages(NamedTuple):
    """Images that a model is evaluated on: their part, their number over all ranks, and the batches of this rank."""

    part: Part
    num_images: int
    batches: DeviceLoader


@dataclass(kw_only=True)
class RankState:
    """Everything that one rank trains with.

    `parallel_model` is the model of `network` wrapped in DistributedDataParallel or DataParallel. `cpu_group` is a Gloo
    process group for tensors in host memory.
    """

    job: Job
    rank_info: RankInfo
    sampler: DistributedBatchSampler
    pipeline: InputPipeline
    device: torch.device
    network: TrainingModel
    parallel_model: nn.Module
    criterion: Criterion
    optimizer: Optimizer
    own_metrics: OwnMetrics
    cpu_group: dist.ProcessGroup
    channel: Channel
    skipped: InitVar[SkippedSteps]
    lr_of_step: Callable[[int], float]
    """Learning rate of a step, counted from 1 in the data of all epochs, without the factor of schedule `plateau`."""
    position: Position

    def __post_init__(self, skipped: SkippedSteps) -> None:
        self.config = config = self.job.config
        self.model, self.master, self.ema = self.network.model, self.network.master, self.network.ema
        self.image_format, self.num_classes = self.pipeline.image_format, len(self.pipeline.source.classes)
        self.batch_device = batch_device(config.device, self.device)
        self.memory_format = resolve_memory_format(config, self.model, self.device)
        # The batches of training and evaluation in their order.
        self.batches = self.pipeline.device_loader(self.batch_device, self.memory_format)
        self.mixer = build_mixer(config, self.num_classes)
        self.validation_loss = build_validation_loss(config, self.num_classes, self.device, self.criterion)
        self.scaler = build_grad_scaler(config.precision, self.device)
        self.plateau, self.early_stop = PlateauFactor(config.schedule), EarlyStop(config.run)
        self.agreement, self.timer = Agreement(self.cpu_group), PhaseTimer(self.device)
        self.train_metrics = MetricAccumulator(self.device)
        self.skips_nonfinite = config.optim.nonfinite == "skip"
        self.step_log = StepLog(
            log_every=config.run.log_every,
            global_batch=self.sampler.global_batch,
            device=self.device,
            channel=self.channel,
            skipped=skipped,
            emits_events=self.rank_info.rank == 0,
            may_skip=self.skips_nonfinite,
        )
        self.input_dtype, self.uses_tf32 = input_dtype(config.precision), tf32_is_on(self.device)
        self._reported_files: set[str] = set()
        self._consecutive_unreadable = 0
        # Cached: iterating over all modules in every step is slow.
        self._parameters = list(self.model.parameters())

    def is_last_epoch(self, epoch: int) -> bool:
        """Return whether training ends with this epoch. Call after its evaluation."""
        return epoch == self.config.run.epochs or self.early_stop.expired

    def start_epoch(self, epoch: int) -> None:
        self.position.epoch, self.position.step_in_epoch = epoch, 0
        self.train_metrics = MetricAccumulator(self.device)

    def enter_phase(self, phase: Phase) -> None:
        """Write the heartbeat that the watchdog reads."""
        self.channel.enter_phase(self.position.step, phase)

    def next_train_batch(self) -> DeviceBatch:
        """Return the next training batch, and add the wait for it to the data wait."""
        self.timer.start_data_wait()
        batch = self.next_batch(self.train_metrics)
        self.step_log.add_data_wait(self.timer.end_data_wait())
        return batch

    def next_batch(self, metrics: MetricAccumulator, batches: DeviceLoader | None = None) -> DeviceBatch:
        """Return the next batch, of other `batches` if given, its labels on the device. Unreadable images are counted
        in `metrics`.

        Raises UnreadableImageError after too many batches without a readable image.
        """
        self.enter_phase(Phase.DATA)
        batch = next(batches or self.batches)
        if batch.unread:
            metrics.counts[2] += len(batch.unread)
            self._warn_unreadable(batch.unread)
        self._consecutive_unreadable = (
            self._consecutive_unreadable + 1 if batch.unread and batch.loss_weight == 0 else 0
        )
        if self._consecutive_unreadable > MAX_UNREADABLE_BATCHES:
            raise UnreadableImageError(
                f"no readable image in {self._consecutive_unreadable} consecutive batches: {batch.unread[0]}"
            )
        return replace(batch, labels=batch.labels.to(self.device))

    def _warn_unreadable(self, files: Sequence[str]) -> None:
        """Warn once per file."""
        new_files = [file for file in files if file not in self._reported_files]
        self._reported_files.update(new_files)
        for file in new_files:
            self.channel.send(WarningEvent(message=f"{file}; skipped", code="bad-image"))

    def restart_step_clock(self) -> None:
        """Exclude the time since the last step from the throughput."""
        self.step_log.restart_clock()

    def mix(self, batch: DeviceBatch, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return images and targets after mixup or cutmix; without them the batch's own images and labels."""
        if self.mixer is None:
            return batch.images, batch.labels
        batch_index = self.position.step_in_epoch * self.sampler.accumulate + micro_batch
        return self.mixer(batch.images, batch.labels, self.position.epoch, batch_index, self.sampler.rank)

    def compute_logits(self, model: Callable[[Tensor], Tensor], images: Tensor, dtype: torch.dtype) -> Tensor:
        """Run `model`, wrapped or not, on images. Call within `autocast`."""
        with eager_for_partial_batch(self.config, len(images), self.sampler.batch_size):
            logits: Tensor = model(images.to(dtype, memory_format=self.memory_format))
        return logits

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without the all-reduce of DistributedDataParallel."""
        if isinstance(self.parallel_model, DistributedDataParallel):
            return cast(AbstractContextManager[None], self.parallel_model.no_sync())
        return nullcontext()

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def copy_grads_to_master(self) -> None:
        if self.master is not None:
            model_grads_to_master_grads(self.model, self.master)

    def copy_master_to_model(self) -> None:
        if self.master is not None:
            master_params_to_model_params(self.model, self.master)

    def snapshot_buffers(self) -> list[Tensor]:
        """Return copies of the model's buffers if steps may be skipped, else nothing."""
        return [buffer.clone() for buffer in self.model.buffers()] if self.skips_nonfinite else []

    def restore_buffers(self, snapshot: Sequence[Tensor], nonfinite: Tensor) -> None:
        """Copy the snapshot back to the model if `nonfinite` is true, without a host sync."""
        if snapshot:
            for buffer, saved in zip(self.model.buffers(), snapshot, strict=True):
                buffer.copy_(torch.where(nonfinite, saved, buffer))

    def broadcast_buffers(self) -> None:
        """Copy rank 0's buffers (BatchNorm's running statistics) to all ranks. A collective."""
        broadcast_tensors(self.model.buffers())

    def lr_at(self, step_in_epoch: int) -> float:
        """Return the learning rate of a step (from 1) of the current epoch.

        It depends on the position in the data, not on the number of steps taken: a run that resumes with another batch
        size keeps its schedule.
        """
        step = (self.position.epoch - 1) * self.sampler.steps_per_epoch + step_in_epoch
        return self.lr_of_step(step) * self.plateau.factor

    def log_step(
        self, results: Sequence[MicroBatchResult], nonfinite: Tensor, quantities: Mapping[str, Tensor], lr: float
    ) -> None:
        """Add a step to the training metrics and the step log. Raises NonFiniteLossError for an earlier step."""
        for result in results:
            if result.weight > 0:
                self.train_metrics.add(result.loss, result.correct, result.num_images, nonfinite)
        step_loss = results[0].loss * results[0].weight
        for result in results[1:]:
            step_loss += result.loss * result.weight
        self.step_log.quantities = quantities
        self.step_log.add(step_loss, nonfinite, self.position.step, self.position.epoch, lr)

    def compute_own_metrics(self, outputs: Sequence[Outputs]) -> dict[str, float]:
        """Return the user's own metrics over all ranks on rank 0, nothing on other ranks. A collective."""
        gathered = gather_outputs(outputs, self.num_classes, self.cpu_group)
        if gathered is None:
            return {}
        return self.own_metrics.compute(gathered, lambda problem: self.channel.send(WarningEvent.of(problem)))

    def check_step_log(self) -> None:
        """Raise NonFiniteLossError if the steps that no event has reported yet must halt the run. A collective."""
        self.step_log.wait_pending()
        self.step_log.check_unreported(self.position.step, self.position.epoch, self.lr_at(self.position.step_in_epoch))

    def flush_step_log(self) -> None:
        """Report all steps so far. A collective."""
        self.step_log.start_reduction(self.position.step, self.position.epoch, self.lr_at(self.position.step_in_epoch))
        self.step_log.wait_pending()
