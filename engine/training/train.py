"""One rank: process group, device, build, train. The only set-up of torch.distributed."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

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
from engine.models.training_model import build_network
from engine.optim.lr_schedule import unreachable
from engine.optim.optimizers import build_optimizer
from engine.optim.plateau import Plateau
from engine.runs.checkpoint_files import DamagedCheckpointError
from engine.runs.folder import RunFolder
from engine.training.checkpoint import load_checkpoint, load_newest
from engine.training.device import _open_device
from engine.training.job import Job, Outcome
from engine.training.losses import build_loss
from engine.training.metrics import Totals
from engine.training.rank_state import Position, Trainer
from engine.training.rng import seed_everything
from engine.training.step_log import SkippedSteps, StepLog
from engine.training.trainer import Fit
from engine.training.warmup import warm_up
from engine.utils.errors import Problem, UsageError, collecting


def train(job: Job, seat: Seat, store: Store, channel: Channel) -> Outcome:
    """Train as one rank of the run. Raises UsageError where what was asked for turns out to be impossible, on every
    rank alike."""
    config = job.config
    torch.set_num_threads(job.plan.threads)
    source = job.source or open_source(config)
    shares = shares_of(config, source, seat.world_size, seat.rank, job.plan.devices_a_rank)
    check_source(config, source, shares)
    problems = sync_bn_problems(config, seat.world_size, on_gpu=job.plan.on_gpu)
    problems += unreachable(config.schedule, shares.steps_per_epoch, config.run.epochs)
    if problems:
        raise UsageError(problems)
    saved, damaged = _load(job.folder, seat, store) if job.folder and job.resumed else (None, [])
    position = position_of(saved, shares) if saved else Position()

    # Loader processes are forked before this process touches CUDA or starts threads, and work while the rest is set up.
    images = image_format(config, source)
    choice = _choose(job, source, seat, store)
    workers = _workers(job, source, images, shares, position.epoch) if choice.pipeline == "stream" else 0
    warnings = warnings_of_shares(shares) + pipeline_warnings(config, choice)
    warnings += loading_warnings(config, job.plan.ranks, workers, images, job.plan.devices_a_rank)
    requests = shares.run(config.run.epochs, position.epoch, position.batch)
    feed = Feed(choice, source, config, images, requests, workers)
    warnings += feed.warnings
    try:
        fit = set_up(job, seat, store, channel, source, shares, images, feed, saved)
        if saved:
            fit.restore(saved, damaged)
            # It holds as much memory as the model and the optimizer.
            saved.clear()
        elif job.resumed:
            fit.begin_anew()
        outcome = fit.try_one_batch(warnings) if job.folder is None else fit.run(warnings)
    except Exception:
        # The process group is left as it is: to end it would wait for ranks that wait for this one.
        feed.name_the_dead()
        raise
    dist.destroy_process_group()
    return outcome


def set_up(
    job: Job,
    seat: Seat,
    store: Store,
    channel: Channel,
    source: Source,
    shares: Shares,
    images: ImageFormat,
    feed: Feed,
    saved: dict[str, Any] | None,
) -> Fit:
    """Device, model, process group, and all that trains with them."""
    config = job.config
    device = _open_device(config, job.plan, seat)
    seed_everything(config.run.seed)
    classes, problems = len(source.classes), list[Problem]()
    with collecting(problems):
        criterion = build_loss(config, classes, lambda: class_counts(source), device)
    with collecting(problems):
        network = build_network(config, images, source.classes, device, problems, saved)
        optimizer = build_optimizer(config.optim, network.trained, shares.devices)
    if problems:
        raise UsageError(problems)

    timeout = timedelta(seconds=config.device.timeout)
    dist.init_process_group(job.plan.backend, store=store, rank=seat.rank, world_size=seat.world_size, timeout=timeout)
    hosts: Any = dist.new_group(backend="gloo", timeout=timeout)
    ranks = gather_places(job.plan, seat, hosts)
    # Before NCCL is first used: it would fail on this in words of its own.
    refuse_shared_devices(ranks)
    trainer = Trainer(
        config,
        device,
        shares,
        network.model,
        wrap(network.model, config.device, device, job.plan.devices_a_rank, shares.world_size),
        network.master,
        network.frozen,
        criterion,
        Mixer(config.augment, classes, config.run.seed),
        optimizer,
        gradient_scaler(config.precision, device),
        Plateau(config.schedule),
        network.ema,
        feed.on(device),
        images,
        classes,
        channel,
        Agreement(hosts),
        _step_log(config, shares, device, channel, saved, speaks=seat.rank == 0),
        position_of(saved, shares) if saved else Position(),
        Totals(device),
    )
    seed_everything(config.run.seed + seat.rank)
    tried = warm_up(trainer, hosts)
    return Fit(job, seat, trainer, source, hosts, ranks, network.notes, feed.choice, tried)


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


def position_of(saved: dict[str, Any], shares: Shares) -> Position:
    """Where a checkpoint goes on. With another global batch it is the first batch that begins with no image of the
    epoch that was seen already."""
    done = -(-saved["batch"] * saved["global_batch"] // shares.global_batch)
    return Position(saved["epoch"], min(done, shares.steps_per_epoch), saved["step"])


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
