"""Set up one rank, from its data to its process group, and train with it.

`engine.launch` calls `train` in the process of each rank; `trainer` and `loop` run the epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.optim import Optimizer

from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.batching import (
    build_sampler,
    check_source,
    class_counts,
    sampler_warnings,
)
from engine.data.device import InputPipeline
from engine.data.plan import InputPlan, plan_input
from engine.data.sampler import DistributedBatchSampler
from engine.data.sources.base import ImageSource
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from engine.distributed.channel import Channel
from engine.distributed.messages import decide_on_rank_0
from engine.distributed.parallel import wrap_model
from engine.distributed.process_group import join_process_group
from engine.distributed.rank_env import RankInfo
from engine.gpus.numa import bind_to_node
from engine.models.freeze import set_train_mode
from engine.models.precision import max_scaler_skips
from engine.models.training_model import TrainingModel, build_training_model
from engine.optim.lr_schedule import lr_factor, lr_scaling_factor, scaled_lr, schedule_length_problems
from engine.optim.optimizers import build_optimizer
from engine.optim.user_schedule import load_user_schedule
from engine.runs.events import WarningEvent
from engine.training.device import init_device
from engine.training.job import Job, Outcome
from engine.training.loop import forward_backward, training_loop
from engine.training.losses import Criterion, build_loss
from engine.training.memory import manual_gc
from engine.training.own_metrics import OwnMetrics
from engine.training.range_test import run_range_test
from engine.training.rank_state import Position, RankState
from engine.training.resume import describe_lr_rise, load_for_resume
from engine.training.rng import seed_everything
from engine.training.step_log import SkippedSteps
from engine.training.trainer import Trainer
from engine.training.warmup import warm_up
from engine.utils.answers import Answer
from engine.utils.errors import Problem, collect_problems, raise_if_any


def train(job: Job, rank_info: RankInfo, store: Store, channel: Channel) -> Outcome:
    """Train as one rank of the run. Raises UsageError, on all ranks, if config, data or checkpoint cannot be used."""
    config = job.config
    # Before the first thread, and before memory is allocated.
    if (node := job.plan.numa_node(rank_info.local_rank)) is not None:
        bind_to_node(node)
    torch.set_num_threads(job.plan.threads_per_rank)

    # 1. Open the data, and check that the run can train on it.
    source = job.source or open_source(config)
    if config.data.batch_size == "auto":
        # Its trials are built as this rank is.
        from engine.training.batch_size import with_largest_batch_size

        job = with_largest_batch_size(job, rank_info, store, channel, source)
        config = job.config
    sampler = build_sampler(config, source, rank_info.world_size, rank_info.rank, job.plan.devices_per_rank)
    check_source(config, source, sampler)
    raise_if_any(schedule_length_problems(config.schedule, sampler.steps_per_epoch, config.run.epochs))

    # 2. Load the newest checkpoint, compare config and data with it, and find the position to resume at.
    checkpoint, notes = None, list[Problem]()
    if job.resumed and job.folder is not None:
        checkpoint, notes = load_for_resume(job.folder, config, source, rank_info, store)
    position = resume_position(checkpoint, sampler)
    if checkpoint:
        step = (position.epoch - 1) * sampler.steps_per_epoch + position.step_in_epoch
        saved, devices = checkpoint["config"], sampler.num_devices
        notes += describe_lr_rise(saved, config, step, sampler.steps_per_epoch, devices)

    # 3. Start the input pipeline, which rank 0 plans: free memory and libraries differ between the ranks. Its workers
    # are forked before this process touches CUDA or starts threads, and load the first batches during the rest of the
    # setup.
    input_plan = decide_on_rank_0(
        "pipeline", lambda: _plan_input(job, source, sampler), Answer[InputPlan], rank_info, store
    )
    pipeline = _start_pipeline(job, source, sampler, position, input_plan)
    warnings = [*notes, *sampler_warnings(sampler), *pipeline.warnings]
    try:
        # 4. Build device, model, optimizer and process group, and restore their state.
        trainer = build_trainer(job, rank_info, store, channel, sampler, pipeline, checkpoint=checkpoint)
        if checkpoint:
            trainer.restore(checkpoint)
            # Frees as much memory as model and optimizer take.
            checkpoint.clear()
        elif job.resumed:
            message = "this run has no checkpoint yet: it starts from the beginning"
            trainer.emit(WarningEvent(message=message, code="no-checkpoint"))

        # 5. Train.
        if job.lr_range is not None:
            outcome = run_range_test(trainer, job.lr_range, warnings)
        else:
            outcome = dry_run(trainer, warnings) if job.folder is None else run_training(trainer, warnings)
    except Exception:
        # The process group is not destroyed: that would wait for ranks that wait for this one.
        pipeline.raise_if_worker_died()
        raise
    dist.destroy_process_group()
    return outcome


def run_training(trainer: Trainer, warnings: Sequence[Problem]) -> Outcome:
    """Train to the end or to a stop; `warnings` are emitted before the first step."""
    trainer.start_run(warnings)
    try:
        with manual_gc() as trainer.collect_garbage:
            outcome = training_loop(trainer)
            trainer.end_run(outcome)
    except BaseException:
        # The checkpoint that is being written is that of an earlier step: it must not be lost.
        with suppress(Exception):
            trainer.finish_checkpoint()
        raise
    return outcome


def dry_run(trainer: Trainer, warnings: Sequence[Problem]) -> Outcome:
    """Run forward and backward on one batch; `warnings` are emitted before it. Changes no weights and no files."""
    state = trainer.state
    # First, because a batch that does not fit into shared memory may never arrive.
    trainer.emit_warnings(warnings)
    set_train_mode(state.model, state.network.frozen)
    forward_backward(state, state.next_train_batch(), 0)
    trainer.emit(trainer.run_started())
    trainer.warn_skipped_files()
    return "finished"


def _plan_input(job: Job, source: ImageSource, sampler: DistributedBatchSampler) -> InputPlan:
    first, plan = next(sampler.train_requests(1)), job.plan
    return plan_input(
        job.config,
        source,
        first,
        local_world_size=plan.local_world_size,
        cores_per_rank=plan.cores_per_rank,
        uses_nccl=plan.uses_nccl,
    )


def _start_pipeline(
    job: Job, source: ImageSource, sampler: DistributedBatchSampler, position: Position, input_plan: InputPlan
) -> InputPipeline:
    """Start loading the batches from a position on."""
    config, image_format = job.config, model_input_format(job.config, source)
    if job.lr_range is not None:
        requests = sampler.repeated_train_requests(job.lr_range.steps)
    else:
        requests = sampler.requests(config.run.epochs, position.epoch, position.step_in_epoch)
    return InputPipeline(input_plan, source, config, image_format, requests, job.plan.devices_per_rank)


def build_trainer(
    job: Job,
    rank_info: RankInfo,
    store: Store,
    channel: Channel,
    sampler: DistributedBatchSampler,
    pipeline: InputPipeline,
    *,
    checkpoint: dict[str, Any] | None = None,
) -> Trainer:
    """Build the device, model, optimizer and process group of one rank. Raises UsageError."""
    config, source = job.config, pipeline.source
    device = init_device(config, job.plan, rank_info)
    # The same seed on every rank: EMA and master weights are copied before DDP broadcasts the weights of rank 0.
    seed_everything(config.run.seed)
    lr_of_step = _lr_of_step(job, sampler)
    own_metrics = OwnMetrics(config, len(source.classes), max(sampler.val_images, source.num_images("test")))
    network, criterion, optimizer = _build_model(config, sampler, pipeline, device, checkpoint)
    cpu_group, rank_devices = join_process_group(config, job.plan, device, rank_info, store)
    parallel_model = wrap_model(network.model, config.device, device, job.plan.devices_per_rank, sampler.world_size)
    state = RankState(
        job=job,
        rank_info=rank_info,
        sampler=sampler,
        pipeline=pipeline,
        device=device,
        network=network,
        parallel_model=parallel_model,
        criterion=criterion,
        optimizer=optimizer,
        own_metrics=own_metrics,
        cpu_group=cpu_group,
        channel=channel,
        skipped=_skipped_steps(config, checkpoint),
        lr_of_step=lr_of_step,
        position=resume_position(checkpoint, sampler),
    )
    # Another seed on each rank: dropout must not drop the same units everywhere.
    seed_everything(config.run.seed + rank_info.rank)
    return Trainer(state, rank_devices, warm_up(state))


def _lr_of_step(job: Job, sampler: DistributedBatchSampler) -> Callable[[int], float]:
    """Return the learning rate as a function of the step: that of the range test, else of the schedule. Raises
    UsageError if the user's own schedule does not work."""
    config, lr_range, steps_per_epoch = job.config, job.lr_range, sampler.steps_per_epoch
    if lr_range is not None:
        scaling = lr_scaling_factor(config.optim, sampler.num_devices)
        return lambda step: scaling * lr_range.lr_at(step)
    peak_lr = scaled_lr(config.optim, sampler.num_devices)
    is_own = is_user_code(config.schedule.name)
    user_factor = load_user_schedule(config, steps_per_epoch).__getitem__ if is_own else None
    return lambda step: peak_lr * lr_factor(config.schedule, step, steps_per_epoch, config.run.epochs, user_factor)


def _build_model(
    config: Config,
    sampler: DistributedBatchSampler,
    pipeline: InputPipeline,
    device: torch.device,
    checkpoint: dict[str, Any] | None,
) -> tuple[TrainingModel, Criterion, Optimizer]:
    """Build model, loss and optimizer. Raises UsageError with the problems of all three."""
    source, problems = pipeline.source, list[Problem]()
    with collect_problems(problems):
        criterion = build_loss(config, len(source.classes), lambda: class_counts(source), device)
    with collect_problems(problems):
        network = build_training_model(config, pipeline.image_format, source.classes, device, problems, checkpoint)
        optimizer = build_optimizer(
            config.optim, network.optimized_model, sampler.num_devices, config.run, network.notes
        )
    raise_if_any(problems)
    return network, criterion, optimizer


def resume_position(checkpoint: dict[str, Any] | None, sampler: DistributedBatchSampler) -> Position:
    """Return the position to resume at, or the start of training without a checkpoint.

    After a change of the global batch size this is the first step without an image that the epoch has already used.
    """
    if not checkpoint:
        return Position()
    steps_done = -(-checkpoint["step_in_epoch"] * checkpoint["global_batch"] // sampler.global_batch)
    return Position(checkpoint["epoch"], min(steps_done, sampler.steps_per_epoch), checkpoint["step"])


def _skipped_steps(config: Config, checkpoint: dict[str, Any] | None) -> SkippedSteps:
    limit = config.optim.nonfinite_limit if config.optim.nonfinite == "skip" else 0
    limit += max_scaler_skips(config.precision)
    if not checkpoint:
        return SkippedSteps(limit)
    return SkippedSteps(limit, checkpoint["skipped"], checkpoint["consecutive_skipped"])
