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
from engine.data.augment.mixup import Mixer
from engine.data.batching import check_source, class_counts, shares_of, warnings_of_shares
from engine.data.limits import auto_workers, loading_warnings
from engine.data.pipelines.choose import Choice, choose_pipeline, pipeline_warnings
from engine.data.pipelines.input_pipeline import Feed
from engine.data.pipelines.loader import RequestedBatches
from engine.data.pipelines.num_workers import measured_workers
from engine.data.sampler import Shares
from engine.data.sources.base import ImageFormat, Source
from engine.data.sources.formats import image_format
from engine.data.sources.open import open_source
from engine.distributed.agreement import Agreement
from engine.distributed.channel import Channel
from engine.distributed.parallel import wrap
from engine.distributed.rank_env import Seat
from engine.distributed.topology import gather_places, refuse_shared_devices
from engine.models.precision import gradient_scaler, skips_of_scaler
from engine.models.training_model import Network, build_network
from engine.optim.lr_schedule import unreachable
from engine.optim.optimizers import build_optimizer
from engine.optim.plateau import Plateau
from engine.runs.checkpoint_files import DamagedCheckpointError
from engine.runs.folder import RunFolder
from engine.runs.records import RankDevice
from engine.training.checkpoint import load_checkpoint, load_newest
from engine.training.device import _open_device
from engine.training.job import Job, Outcome
from engine.training.losses import Criterion, build_loss
from engine.training.metrics import Totals
from engine.training.rank_state import Position, Trainer
from engine.training.rng import seed_everything
from engine.training.step_log import SkippedSteps, StepLog
from engine.training.trainer import Fit
from engine.training.warmup import warm_up
from engine.utils.errors import Problem, UsageError, collecting


@dataclass(frozen=True)
class TrainingData:
    """The input side of one rank: the images, how they are dealt out, the form that the model takes them in, and the
    pipeline that batches come from."""

    source: Source
    sampler: Shares
    image_format: ImageFormat
    pipeline: Feed


def train(job: Job, seat: Seat, store: Store, channel: Channel) -> Outcome:
    """Train as one rank of the run. Raises UsageError where what was asked for turns out to be impossible, on every
    rank alike."""
    config = job.config
    torch.set_num_threads(job.plan.threads)

    # 1. Open the data, and check that the run can train on it.
    source = job.source or open_source(config)
    sampler = shares_of(config, source, seat.world_size, seat.rank, job.plan.devices_a_rank)
    _check(job, seat, source, sampler)

    # 2. Restore the position from the newest checkpoint.
    checkpoint, damaged = _load(job.folder, seat, store) if job.folder and job.resumed else (None, [])
    position = resume_position(checkpoint, sampler)

    # 3. Start the input pipeline. Loader processes are forked before this process touches CUDA or starts threads, and
    # work while the rest is set up.
    choice = _choose(job, source, seat, store)
    data, warnings = _start_pipeline(job, source, sampler, position, choice)
    try:
        # 4. Build device, model, optimizer and process group, and take back their state.
        fit = build_trainer(job, seat, store, channel, data, checkpoint)
        if checkpoint:
            fit.restore(checkpoint, damaged)
            # It holds as much memory as the model and the optimizer.
            checkpoint.clear()
        elif job.resumed:
            fit.begin_anew()

        # 5. Train.
        outcome = fit.try_one_batch(warnings) if job.folder is None else fit.run(warnings)
    except Exception:
        # The process group is left as it is: to end it would wait for ranks that wait for this one.
        data.pipeline.name_the_dead()
        raise
    dist.destroy_process_group()
    return outcome


def _check(job: Job, seat: Seat, source: Source, sampler: Shares) -> None:
    """Raises UsageError where the config cannot be trained with on this data and so many ranks."""
    config = job.config
    check_source(config, source, sampler)
    problems = sync_bn_problems(config, seat.world_size, on_gpu=job.plan.on_gpu)
    problems += unreachable(config.schedule, sampler.steps_per_epoch, config.run.epochs)
    if problems:
        raise UsageError(problems)


def _start_pipeline(
    job: Job, source: Source, sampler: Shares, position: Position, choice: Choice
) -> tuple[TrainingData, list[str]]:
    """Start to load the batches from a position on; also returns warnings for the log."""
    config, plan = job.config, job.plan
    model_format = image_format(config, source)
    workers = _workers(job, source, model_format, sampler, position.epoch) if choice.pipeline == "stream" else 0
    warnings = warnings_of_shares(sampler) + pipeline_warnings(config, choice)
    warnings += loading_warnings(config, plan.ranks, workers, model_format, plan.devices_a_rank)
    requests = sampler.run(config.run.epochs, position.epoch, position.batch)
    pipeline = Feed(choice, source, config, model_format, requests, workers)
    return TrainingData(source, sampler, model_format, pipeline), warnings + pipeline.warnings


def build_trainer(
    job: Job, seat: Seat, store: Store, channel: Channel, data: TrainingData, checkpoint: dict[str, Any] | None
) -> Fit:
    """Build what trains on the data: device, model, optimizer and process group. Raises UsageError."""
    config, sampler = job.config, data.sampler
    device = _open_device(config, job.plan, seat)
    seed_everything(config.run.seed)
    network, criterion, optimizer = _build_model(config, data, device, checkpoint)
    cpu_group, ranks = _join_process_group(job, seat, store)
    state = Trainer(
        config=config,
        device=device,
        shares=sampler,
        model=network.model,
        wrapped=wrap(network.model, config.device, device, job.plan.devices_a_rank, sampler.world_size),
        master=network.master,
        frozen=network.frozen,
        ema=network.ema,
        criterion=criterion,
        mixer=Mixer(config.augment, len(data.source.classes), config.run.seed),
        optimizer=optimizer,
        scaler=gradient_scaler(config.precision, device),
        plateau=Plateau(config.schedule),
        batches=data.pipeline.on(device),
        image_format=data.image_format,
        classes=len(data.source.classes),
        channel=channel,
        agree=Agreement(cpu_group),
        log=_step_log(config, sampler, device, channel, checkpoint, speaks=seat.rank == 0),
        position=resume_position(checkpoint, sampler),
        totals=Totals(device),
    )
    seed_everything(config.run.seed + seat.rank)
    tried = warm_up(state, cpu_group)
    return Fit(
        job=job,
        seat=seat,
        trainer=state,
        source=data.source,
        hosts=cpu_group,
        ranks=ranks,
        notes=network.notes,
        choice=data.pipeline.choice,
        tried=tried,
    )


def _build_model(
    config: Config, data: TrainingData, device: torch.device, checkpoint: dict[str, Any] | None
) -> tuple[Network, Criterion, Optimizer]:
    """The model with its loss and its optimizer. Raises UsageError with all that is wrong with them."""
    classes, problems = data.source.classes, list[Problem]()
    with collecting(problems):
        criterion = build_loss(config, len(classes), lambda: class_counts(data.source), device)
    with collecting(problems):
        network = build_network(config, data.image_format, classes, device, problems, checkpoint)
        optimizer = build_optimizer(config.optim, network.trained, data.sampler.devices)
    if problems:
        raise UsageError(problems)
    return network, criterion, optimizer


def _join_process_group(job: Job, seat: Seat, store: Store) -> tuple[dist.ProcessGroup, list[RankDevice]]:
    """Join the other ranks; returns a group for tensors in host memory as well, and where each rank is. Raises
    UsageError where two ranks share a GPU."""
    timeout = timedelta(seconds=job.config.device.timeout)
    dist.init_process_group(job.plan.backend, store=store, rank=seat.rank, world_size=seat.world_size, timeout=timeout)
    cpu_group: Any = dist.new_group(backend="gloo", timeout=timeout)
    ranks = gather_places(job.plan, seat, cpu_group)
    # Before NCCL is first used: it would fail on this in words of its own.
    refuse_shared_devices(ranks)
    return cpu_group, ranks


def _load(folder: RunFolder, seat: Seat, store: Store) -> tuple[dict[str, Any] | None, list[str]]:
    """The checkpoint to go on from, the same on every rank: rank 0 finds the newest sound one and tells the others
    which; and what is wrong with those that are newer. Raises UsageError, on every rank alike."""
    if seat.rank != 0:
        told = json.loads(store.get("checkpoint"))
        if "refused" in told:
            raise UsageError.one("", "rank 0 found no sound checkpoint")
        try:
            return (load_checkpoint(folder.checkpoints / told["name"]) if told["name"] else None), []
        except DamagedCheckpointError as error:
            raise UsageError.one(
                str(folder.checkpoints / told["name"]), f"{error}, but not on rank 0's host"
            ) from error
    news: dict[str, Any] = {"refused": True}
    try:
        path, state, damaged = load_newest(folder.checkpoints)
        news = {"name": path.name if path else None}
        return state or None, damaged
    finally:
        store.set("checkpoint", json.dumps(news))


def _choose(job: Job, source: Source, seat: Seat, store: Store) -> Choice:
    """The pipeline, the same on every rank: what is free changes, so rank 0 looks once and tells the others. Raises
    UsageError, on every rank alike."""
    if seat.rank != 0:
        told = json.loads(store.get("pipeline"))
        if "refused" in told:
            raise UsageError([Problem(where, what) for where, what in told["refused"]])
        return Choice(**told)
    news: dict[str, Any] = {"refused": [("", "rank 0 could not choose a pipeline")]}
    try:
        choice = choose_pipeline(job.config, source, job.plan.ranks)
        news = asdict(choice)
        return choice
    except UsageError as error:
        news = {"refused": [(problem.where, problem.what) for problem in error.problems]}
        raise
    finally:
        store.set("pipeline", json.dumps(news))


def resume_position(checkpoint: dict[str, Any] | None, sampler: Shares) -> Position:
    """Where a checkpoint goes on, or the beginning without one. With another global batch it is the first batch that
    begins with no image of the epoch that was seen already."""
    if not checkpoint:
        return Position()
    done = -(-checkpoint["batch"] * checkpoint["global_batch"] // sampler.global_batch)
    return Position(checkpoint["epoch"], min(done, sampler.steps_per_epoch), checkpoint["step"])


def _step_log(
    config: Config,
    shares: Shares,
    device: torch.device,
    channel: Channel,
    saved: dict[str, Any] | None,
    *,
    speaks: bool,
) -> StepLog:
    may_skip = config.optim.nonfinite == "skip"
    limit = (config.optim.nonfinite_limit if may_skip else 0) + skips_of_scaler(config.precision)
    skipped = SkippedSteps(limit, saved["skipped"], saved["skipped_in_row"]) if saved else SkippedSteps(limit)
    return StepLog(
        config.run.log_every, shares.global_batch, device, channel, skipped, speaks=speaks, may_skip=may_skip
    )


def _workers(job: Job, source: Source, images: ImageFormat, shares: Shares, epoch: int) -> int:
    if job.plan.workers is not None:
        return job.plan.workers
    most = auto_workers(job.plan.ranks, job.config.data.batch * job.plan.devices_a_rank)
    return measured_workers(RequestedBatches(source, job.config, images), next(shares.train(epoch)), most)
