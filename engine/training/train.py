"""One rank from its data to the end of its training; the only set-up of torch.distributed. `engine.launch` calls it in
each rank's process, `trainer` runs the epochs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.optim import Optimizer

from engine.config.rules import sync_bn_problems
from engine.config.schema import Config
from engine.data.augment.mixup import MixupCutmix
from engine.data.batching import build_sampler, check_source, class_counts, sampler_warnings
from engine.data.limits import auto_workers, loader_warnings
from engine.data.pipelines.choose import PipelineChoice, choose_pipeline, pipeline_warnings
from engine.data.pipelines.input_pipeline import InputPipeline
from engine.data.pipelines.loader import BatchDataset
from engine.data.pipelines.num_workers import measure_num_workers
from engine.data.sampler import DistributedBatchSampler
from engine.data.sources.base import ImageFormat, ImageSource
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from engine.distributed.agreement import Agreement
from engine.distributed.channel import Channel
from engine.distributed.parallel import wrap_model
from engine.distributed.rank_env import RankInfo
from engine.distributed.topology import check_devices_unique, gather_rank_devices
from engine.models.precision import build_grad_scaler, max_scaler_skips
from engine.models.training_model import TrainingModel, build_training_model
from engine.optim.lr_schedule import schedule_length_problems
from engine.optim.optimizers import build_optimizer
from engine.optim.plateau import PlateauFactor
from engine.runs.checkpoint_files import DamagedCheckpointError
from engine.runs.folder import RunFolder
from engine.runs.records import RankDevice
from engine.training.checkpoint import load_checkpoint, load_newest
from engine.training.device import init_device
from engine.training.job import Job, Outcome
from engine.training.losses import Criterion, build_loss
from engine.training.metrics import MetricAccumulator
from engine.training.rank_state import Position, RankState
from engine.training.rng import seed_everything
from engine.training.step_log import SkippedSteps, StepLog
from engine.training.trainer import Trainer
from engine.training.warmup import warm_up
from engine.utils.errors import Problem, UsageError, collect_problems


@dataclass(frozen=True)
class TrainingData:
    """The input side of one rank: the images, how they are dealt out, the form that the model takes them in, and the
    pipeline that batches come from."""

    source: ImageSource
    sampler: DistributedBatchSampler
    image_format: ImageFormat
    pipeline: InputPipeline


def train(job: Job, rank_info: RankInfo, store: Store, channel: Channel) -> Outcome:
    """Train as one rank of the run. Raises UsageError where what was asked for turns out to be impossible, on every
    rank alike."""
    config = job.config
    torch.set_num_threads(job.plan.threads_per_rank)

    # 1. Open the data, and check that the run can train on it.
    source = job.source or open_source(config)
    sampler = build_sampler(config, source, rank_info.world_size, rank_info.rank, job.plan.devices_per_rank)
    _check(job, rank_info, source, sampler)

    # 2. Restore the position from the newest checkpoint.
    checkpoint, damaged = (
        _load_checkpoint_on_all_ranks(job.folder, rank_info, store) if job.folder and job.resumed else (None, [])
    )
    position = resume_position(checkpoint, sampler)

    # 3. Start the input pipeline. Loader processes are forked before this process touches CUDA or starts threads, and
    # work while the rest is set up.
    pipeline_choice = _choose_pipeline_on_all_ranks(job, source, rank_info, store)
    data, warnings = _start_pipeline(job, source, sampler, position, pipeline_choice)
    try:
        # 4. Build device, model, optimizer and process group, and take back their state.
        trainer = build_trainer(job, rank_info, store, channel, data, checkpoint)
        if checkpoint:
            trainer.restore(checkpoint, damaged)
            # It holds as much memory as the model and the optimizer.
            checkpoint.clear()
        elif job.resumed:
            trainer.warn_no_checkpoint()

        # 5. Train.
        outcome = trainer.dry_run(warnings) if job.folder is None else trainer.run(warnings)
    except Exception:
        # The process group is left as it is: to end it would wait for ranks that wait for this one.
        data.pipeline.raise_if_worker_died()
        raise
    dist.destroy_process_group()
    return outcome


def _check(job: Job, rank_info: RankInfo, source: ImageSource, sampler: DistributedBatchSampler) -> None:
    """Raises UsageError where the config cannot be trained with on this data and so many ranks."""
    config = job.config
    check_source(config, source, sampler)
    problems = sync_bn_problems(config, rank_info.world_size, on_gpu=job.plan.on_gpu)
    problems += schedule_length_problems(config.schedule, sampler.steps_per_epoch, config.run.epochs)
    if problems:
        raise UsageError(problems)


def _start_pipeline(
    job: Job, source: ImageSource, sampler: DistributedBatchSampler, position: Position, pipeline_choice: PipelineChoice
) -> tuple[TrainingData, list[str]]:
    """Start to load the batches from a position on; also returns warnings for the log."""
    config, plan = job.config, job.plan
    model_format = model_input_format(config, source)
    workers = (
        _num_workers(job, source, model_format, sampler, position.epoch) if pipeline_choice.pipeline == "stream" else 0
    )
    warnings = sampler_warnings(sampler) + pipeline_warnings(config, pipeline_choice)
    warnings += loader_warnings(config, plan.local_world_size, workers, model_format, plan.devices_per_rank)
    requests = sampler.requests(config.run.epochs, position.epoch, position.batch)
    pipeline = InputPipeline(pipeline_choice, source, config, model_format, requests, workers)
    return TrainingData(source, sampler, model_format, pipeline), warnings + pipeline.warnings


def build_trainer(
    job: Job, rank_info: RankInfo, store: Store, channel: Channel, data: TrainingData, checkpoint: dict[str, Any] | None
) -> Trainer:
    """Build what trains on the data: device, model, optimizer and process group. Raises UsageError."""
    config, sampler = job.config, data.sampler
    device = init_device(config, job.plan, rank_info)
    seed_everything(config.run.seed)
    network, criterion, optimizer = _build_model(config, data, device, checkpoint)
    cpu_group, ranks = _join_process_group(job, rank_info, store)
    state = RankState(
        config=config,
        device=device,
        sampler=sampler,
        model=network.model,
        wrapped=wrap_model(network.model, config.device, device, job.plan.devices_per_rank, sampler.world_size),
        master=network.master,
        frozen_modules=network.frozen,
        ema=network.ema,
        criterion=criterion,
        mixer=MixupCutmix(config.augment, len(data.source.classes), config.run.seed),
        optimizer=optimizer,
        scaler=build_grad_scaler(config.precision, device),
        plateau=PlateauFactor(config.schedule),
        batches=data.pipeline.device_loader(device),
        image_format=data.image_format,
        num_classes=len(data.source.classes),
        channel=channel,
        agreement=Agreement(cpu_group),
        step_log=_build_step_log(config, sampler, device, channel, checkpoint, emits_events=rank_info.rank == 0),
        position=resume_position(checkpoint, sampler),
        totals=MetricAccumulator(device),
    )
    seed_everything(config.run.seed + rank_info.rank)
    warmup = warm_up(state, cpu_group)
    return Trainer(
        job=job,
        rank_info=rank_info,
        state=state,
        source=data.source,
        cpu_group=cpu_group,
        rank_devices=ranks,
        notes=network.notes,
        pipeline_choice=data.pipeline.pipeline_choice,
        warmup=warmup,
    )


def _build_model(
    config: Config, data: TrainingData, device: torch.device, checkpoint: dict[str, Any] | None
) -> tuple[TrainingModel, Criterion, Optimizer]:
    """The model with its loss and its optimizer. Raises UsageError with all that is wrong with them."""
    classes, problems = data.source.classes, list[Problem]()
    with collect_problems(problems):
        criterion = build_loss(config, len(classes), lambda: class_counts(data.source), device)
    with collect_problems(problems):
        network = build_training_model(config, data.image_format, classes, device, problems, checkpoint)
        optimizer = build_optimizer(config.optim, network.optimized_model, data.sampler.num_devices)
    if problems:
        raise UsageError(problems)
    return network, criterion, optimizer


def _join_process_group(job: Job, rank_info: RankInfo, store: Store) -> tuple[dist.ProcessGroup, list[RankDevice]]:
    """Join the other ranks; returns a group for tensors in host memory as well, and where each rank is. Raises
    UsageError where two ranks share a GPU."""
    timeout = timedelta(seconds=job.config.device.timeout)
    dist.init_process_group(
        job.plan.backend, store=store, rank=rank_info.rank, world_size=rank_info.world_size, timeout=timeout
    )
    cpu_group: Any = dist.new_group(backend="gloo", timeout=timeout)
    ranks = gather_rank_devices(job.plan, rank_info, cpu_group)
    # Before NCCL is first used: it would fail on this in words of its own.
    check_devices_unique(ranks)
    return cpu_group, ranks


def _load_checkpoint_on_all_ranks(
    folder: RunFolder, rank_info: RankInfo, store: Store
) -> tuple[dict[str, Any] | None, list[str]]:
    """The checkpoint to go on from, the same on every rank: rank 0 finds the newest sound one and tells the others
    which; and what is wrong with those that are newer. Raises UsageError, on every rank alike."""
    if rank_info.rank != 0:
        received = json.loads(store.get("checkpoint"))
        if "refused" in received:
            raise UsageError.one("", "rank 0 found no sound checkpoint")
        try:
            return (load_checkpoint(folder.checkpoints / received["name"]) if received["name"] else None), []
        except DamagedCheckpointError as error:
            raise UsageError.one(
                str(folder.checkpoints / received["name"]), f"{error}, but not on rank 0's host"
            ) from error
    message: dict[str, Any] = {"refused": True}
    try:
        path, state, damaged = load_newest(folder.checkpoints)
        message = {"name": path.name if path else None}
        return state or None, damaged
    finally:
        store.set("checkpoint", json.dumps(message))


def _choose_pipeline_on_all_ranks(job: Job, source: ImageSource, rank_info: RankInfo, store: Store) -> PipelineChoice:
    """The pipeline, the same on every rank: what is free changes, so rank 0 looks once and tells the others. Raises
    UsageError, on every rank alike."""
    if rank_info.rank != 0:
        received = json.loads(store.get("pipeline"))
        if "refused" in received:
            raise UsageError([Problem(where, what) for where, what in received["refused"]])
        return PipelineChoice(**received)
    message: dict[str, Any] = {"refused": [("", "rank 0 could not choose a pipeline")]}
    try:
        pipeline_choice = choose_pipeline(job.config, source, job.plan.local_world_size)
        message = asdict(pipeline_choice)
        return pipeline_choice
    except UsageError as error:
        message = {"refused": [(problem.location, problem.message) for problem in error.problems]}
        raise
    finally:
        store.set("pipeline", json.dumps(message))


def resume_position(checkpoint: dict[str, Any] | None, sampler: DistributedBatchSampler) -> Position:
    """Where a checkpoint goes on, or the beginning without one. With another global batch it is the first batch that
    begins with no image of the epoch that was seen already."""
    if not checkpoint:
        return Position()
    done = -(-checkpoint["batch"] * checkpoint["global_batch"] // sampler.global_batch)
    return Position(checkpoint["epoch"], min(done, sampler.steps_per_epoch), checkpoint["step"])


def _build_step_log(
    config: Config,
    sampler: DistributedBatchSampler,
    device: torch.device,
    channel: Channel,
    checkpoint: dict[str, Any] | None,
    *,
    emits_events: bool,
) -> StepLog:
    may_skip = config.optim.nonfinite == "skip"
    limit = (config.optim.nonfinite_limit if may_skip else 0) + max_scaler_skips(config.precision)
    skipped = (
        SkippedSteps(limit, checkpoint["skipped"], checkpoint["skipped_in_row"]) if checkpoint else SkippedSteps(limit)
    )
    return StepLog(
        config.run.log_every,
        sampler.global_batch,
        device,
        channel,
        skipped,
        emits_events=emits_events,
        may_skip=may_skip,
    )


def _num_workers(
    job: Job, source: ImageSource, image_format: ImageFormat, sampler: DistributedBatchSampler, epoch: int
) -> int:
    if job.plan.workers is not None:
        return job.plan.workers
    most = auto_workers(job.plan.local_world_size, job.config.data.numeric_batch_size * job.plan.devices_per_rank)
    return measure_num_workers(
        BatchDataset(source, job.config, image_format), next(sampler.train_requests(epoch)), most
    )
