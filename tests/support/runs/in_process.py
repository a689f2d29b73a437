"""Train with a single rank in the test process: the real components without the startup time of a worker process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist

from engine.base.process import SignalHandler
from engine.config.loader import resolve_config
from engine.runs.control import RequestCounters
from engine.runs.events import EpochEvent, Event
from engine.runs.folder import RunFolder
from engine.train.data.batch import DeviceBatch, DeviceLoader
from engine.train.data.checks import build_sampler
from engine.train.data.device import InputPipeline
from engine.train.data.plan import choose_pipeline
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.distributed.channel import Channel
from engine.train.distributed.node_plan import NodePlan, plan_node
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.train.loop.checkpoint import load_checkpoint
from engine.train.loop.data import resume_position
from engine.train.loop.device import cuda_uuid
from engine.train.loop.job import Job
from engine.train.loop.train import run_training
from engine.train.loop.trainer import Trainer, build_trainer
from engine.train.loop.warmup import Warmup


class PremadeBatches(DeviceLoader):
    """Input pipeline that repeats a few batches, which are already on the device."""

    def __init__(self, batches: list[DeviceBatch]) -> None:
        self._batches = cycle(batches)

    def __next__(self) -> DeviceBatch:
        return next(self._batches)


@contextmanager
def single_rank_trainer(
    *overrides: str,
    folder: Path | None = None,
    events: list[Event] | None = None,
    record: Callable[[Event], None] | None = None,
    checkpoint: Path | None = None,
    base: str | None = "digits",
    on_gpu: bool = False,
) -> Iterator[Trainer]:
    """Yield a trainer that is ready to run, resumed from `checkpoint` if given, on the CPU or the first GPU.

    Its events are passed to `record` if given, else added to `events`.
    """
    config = resolve_config(base, ["device.ranks=1", "device.gpus=cpu", *overrides]).config
    rank_info, source = RankInfo(0, 1, 0, 1), open_source(config)
    sampler, image_format = build_sampler(config, source, 1), model_input_format(config, source)
    state = load_checkpoint(checkpoint) if checkpoint is not None else None
    position = resume_position(state, sampler)
    requests = sampler.requests(config.run.epochs, position.epoch, position.step_in_epoch)
    pipeline = InputPipeline(choose_pipeline(config, source, 1), source, config, image_format, requests)
    received: list[Event] = [] if events is None else events
    channel = Channel(record or received.append, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    plan = plan_node(config, [])
    if on_gpu:
        capability = torch.cuda.get_device_capability()
        plan = NodePlan((f"GPU-{cuda_uuid(torch.device('cuda', 0))}",), (None,), 1, 1, 0, "gloo", capability=capability)
    job = Job(config, plan, RunFolder(folder) if folder else None, False, source)
    threads, environment = torch.get_num_threads(), dict(os.environ)
    # With tests running in parallel, more threads only contend for cores.
    torch.set_num_threads(1)
    try:
        trainer = build_trainer(job, rank_info, dist.HashStore(), channel, sampler, pipeline, state)
        if state is not None:
            trainer.restore(state)
            state.clear()
        yield trainer
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)
        # The process group selects the loopback interface, which later runs of the test process would inherit.
        os.environ.clear()
        os.environ.update(environment)


def train_in_process(folder: Path, *overrides: str, checkpoint: Path | None = None) -> list[EpochEvent]:
    """Train a run in `folder` and return its `epoch` events."""
    events: list[Event] = []
    folder.mkdir(exist_ok=True)
    with single_rank_trainer(*overrides, folder=folder, events=events, checkpoint=checkpoint) as trainer:
        assert run_training(trainer, []) == "finished"
    return [event for event in events if isinstance(event, EpochEvent)]


def warmup_of(trainer: Trainer) -> Warmup:
    """Return the warmup of a trainer, to run it again."""
    return Warmup(trainer.data, trainer.model, trainer.log, trainer.cpu_group)
