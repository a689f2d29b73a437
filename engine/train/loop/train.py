"""Set up one rank, from its data to its process group, and train with it.

`engine.jobs.launch` calls `train` in the process of each rank; `trainer` and `loop` run the epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import Store

from engine.base.errors import Problem, raise_if_any
from engine.runs.events import WarningEvent
from engine.train.data.checks import build_sampler, check_source, sampler_warnings
from engine.train.data.sources.open import open_source
from engine.train.distributed.channel import Channel
from engine.train.distributed.rank_env import RankInfo
from engine.train.loop.data import resume_position, start_pipeline
from engine.train.loop.job import Job, Outcome
from engine.train.loop.loop import forward_backward, next_train_batch, run_range_test, training_loop
from engine.train.loop.memory import manual_gc
from engine.train.loop.resume import describe_lr_rise, load_for_resume
from engine.train.loop.trainer import Trainer, build_trainer
from engine.train.optim.lr_schedule import schedule_length_problems


def train(job: Job, rank_info: RankInfo, store: Store, channel: Channel) -> Outcome:
    """Train as one rank of the run. Raises UsageError, on all ranks, if config, data or checkpoint cannot be used."""
    config = job.config
    torch.set_num_threads(job.plan.threads_per_rank)

    # 1. Open the data, and check that the run can train on it.
    source = job.source or open_source(config)
    if config.data.batch_size == "auto":
        # Its trials are built as this rank is.
        from engine.train.loop.batch_size import with_largest_batch_size

        job = with_largest_batch_size(job, rank_info, store, channel, source)
        config = job.config
    sampler = build_sampler(config, source, rank_info.world_size, rank_info.rank, job.plan.devices_per_rank)
    check_source(config, source, sampler)
    raise_if_any([*schedule_length_problems(config.schedule, sampler.steps_per_epoch, config.run.epochs)])

    # 2. Load the newest checkpoint, compare config and data with it, and find the position to resume at.
    checkpoint, notes = None, list[Problem]()
    if job.resumed and job.folder is not None:
        checkpoint, notes = load_for_resume(job.folder, config, source, rank_info, store)
    position = resume_position(checkpoint, sampler)
    if checkpoint:
        step = (position.epoch - 1) * sampler.steps_per_epoch + position.step_in_epoch
        saved, devices = checkpoint["config"], sampler.num_devices
        notes += describe_lr_rise(saved, config, step, sampler.steps_per_epoch, devices)

    # 3. Start the input pipeline. Its workers are forked before this process touches CUDA or starts threads, and load
    # the first batches during the rest of the setup.
    pipeline = start_pipeline(job, source, sampler, position, rank_info, store)
    warnings = [*notes, *sampler_warnings(sampler), *pipeline.warnings]
    try:
        # 4. Build device, model, optimizer and process group, and restore their state.
        trainer = build_trainer(job, rank_info, store, channel, sampler, pipeline, checkpoint)
        if checkpoint:
            trainer.restore(checkpoint)
            # Frees as much memory as model and optimizer take.
            checkpoint.clear()
        elif job.resumed:
            message = "this run has no checkpoint yet: it starts from the beginning"
            trainer.log.emit(WarningEvent(message=message, code="no-checkpoint"))

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
        with manual_gc():
            outcome = training_loop(trainer)
            trainer.control.end_run(outcome)
    except BaseException:
        # The checkpoint that is being written is that of an earlier step: it must not be lost.
        with suppress(Exception):
            trainer.control.checkpoints.wait()
        raise
    return outcome


def dry_run(trainer: Trainer, warnings: Sequence[Problem]) -> Outcome:
    """Run forward and backward on one batch; `warnings` are emitted before it. Changes no weights and no files."""
    # First, because a batch that does not fit into shared memory may never arrive.
    trainer.emit_warnings(warnings)
    trainer.model.train()
    forward_backward(trainer, next_train_batch(trainer), 0)
    trainer.log.emit(trainer.run_started())
    trainer.warn_skipped_files()
    return "finished"
