"""`data.batch_size: auto`: the largest batch per device with which a training step fits into the memory of all ranks.

Each rank tries steps on random images, alone, before the first collective of the run. The smallest batch size of all
ranks holds for all. `train` calls `with_largest_batch_size`.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from engine.base.answers import Answer
from engine.base.errors import UsageError
from engine.base.process import SignalHandler
from engine.base.text import pluralize
from engine.config.data_sections import AugmentConfig
from engine.config.schema import Config
from engine.runs.control import RequestCounters
from engine.runs.events import WarningEvent
from engine.train.data.batch import DeviceBatch, DeviceLoader
from engine.train.data.checks import build_sampler
from engine.train.data.decoded import memory_parts
from engine.train.data.device import InputPipeline
from engine.train.data.memory import MAX_FREE_GPU_MEMORY_SHARE
from engine.train.data.plan import InputPlan
from engine.train.data.sources.base import ImageSource
from engine.train.data.sources.formats import model_input_format
from engine.train.distributed.channel import Channel
from engine.train.distributed.failures import oom_location
from engine.train.distributed.messages import exchange
from engine.train.distributed.node_plan import NodePlan
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.train.loop.job import Job
from engine.train.loop.loop import train_step
from engine.train.loop.trainer import Trainer, build_trainer

FIXED_PIPELINE = InputPlan("fixed", "the trial needs only one batch")
# BatchNorm cannot normalize a single image whose feature maps are one pixel large.
MIN_TRIAL_BATCH_SIZE = 2
TRIAL_STEPS = 2  # the first step allocates the optimizer's state, so the second has the peak memory
MAX_MEMORY_SHARE = 0.9  # of the free memory; the rest is for fragmentation, which a trial does not see
# NCCL's memory on each of several GPUs, not measured. Estimated from nccl#1685: up to 32 channels, two connections per
# channel, 10 MiB per connection. A trial has one rank, which allocates none of it.
NCCL_BYTES = 2 * 32 * (10 << 20)
# Host memory allows batches whose steps take minutes.
MAX_CPU_BATCH_SIZE = 4096
MAX_CPU_STEP_SECONDS = 2.0


def with_largest_batch_size(job: Job, rank_info: RankInfo, store: Store, channel: Channel, source: ImageSource) -> Job:
    """Return the job with the largest batch size that fits on all ranks. A collective on the store.

    Raises UsageError, on all ranks, if not one image fits."""
    trials = BatchSizeTrials(job, rank_info, source)
    limit = trials.limit if job.plan.on_gpu else min(trials.limit, MAX_CPU_BATCH_SIZE)
    size = largest_fitting(trials.fits, limit)
    trials.end()
    # 0 if not one image fits.
    sizes = [each.get() for each in exchange(store, rank_info, "batch_size", Answer(size))]
    if 0 in sizes:
        reason = f"auto: not even one image fits into the free memory of rank {sizes.index(0)}"
        advice = "reduce data.image_size or device.ranks, or use another model.name"
        raise UsageError.one("data.batch_size", reason, advice, code="out-of-memory")
    size = min(sizes)
    if rank_info.rank == 0:
        reason = f"about the largest batch that fits into {MAX_MEMORY_SHARE:.0%} of the free memory"
        if size == trials.limit:
            reason = "the whole training set in one step; a smaller batch size makes more steps and may learn faster"
        elif not job.plan.on_gpu:
            reason = f"at most {MAX_CPU_BATCH_SIZE} images and {MAX_CPU_STEP_SECONDS:g} s per step"
        unit = "GPU" if job.config.device.parallel == "dp" else "rank"
        message = f"data.batch_size auto: {pluralize(size, 'image')} per {unit}, {reason}"
        channel.send(WarningEvent(message=message, code="batch-size"))
    return replace(job, config=job.config.with_values(data={"batch_size": size}))


def largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` that fits, to a sixteenth and a multiple of 8; 0 if none does.

    Doubles until one does not fit, then bisects."""
    low, high = 0, limit + 1
    while high - low > max(low // 16, 1):
        middle = min(max(2 * low, MIN_TRIAL_BATCH_SIZE), limit) if high > limit else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low if low == limit or low < 32 else low - low % 8


class BatchSizeTrials:
    """Trains a rank alone with one batch size after the other.

    On a GPU the allocator reports that memory is full: it may use a share of what is free. On the CPU the time of a
    step ends the search long before host memory is full.
    """

    def __init__(self, job: Job, rank_info: RankInfo, source: ImageSource) -> None:
        self._plan, self._local_rank, self._world_size = job.plan, rank_info.local_rank, rank_info.world_size
        step_devices = rank_info.world_size * job.plan.devices_per_rank * job.config.optim.accumulate
        self.limit = max(source.num_images("train") // step_devices, 1)
        """The batch size with which the whole training set is one step."""
        self._config, self._source = _without_delays(job.config, min(MIN_TRIAL_BATCH_SIZE, self.limit)), source
        self._trainer: Trainer | None = None
        self._environ = dict(os.environ)
        if not job.plan.on_gpu:
            return
        # Reserve the memory of NCCL, and of a dataset that may be kept on the GPU.
        config = job.config
        parts = memory_parts(source, config, model_input_format(config, source))
        dataset = sum(math.prod(part.shape) for part in parts)
        may_reside = config.data.pipeline in ("auto", "memory") and config.device.parallel == "ddp"
        # DataParallel copies the model with NCCL, without a process group.
        uses_nccl = self._plan.devices_per_rank > 1 or (self._world_size > 1 and self._plan.uses_nccl)
        for index in self._plan.device_indices(self._local_rank):
            free, total = torch.cuda.mem_get_info(index)
            resident = dataset if may_reside and dataset <= MAX_FREE_GPU_MEMORY_SHARE * free else 0
            budget = MAX_MEMORY_SHARE * free - (NCCL_BYTES if uses_nccl else 0) - resident
            torch.cuda.set_per_process_memory_fraction(max(budget, 0) / total, index)

    def fits(self, size: int) -> bool:
        """Whether training steps with this batch size fit into memory, and on the CPU do not take too long."""
        try:
            seconds = self._step_seconds(size)
        except (RuntimeError, MemoryError, ValueError) as error:
            # BatchNorm refuses a batch of one image, the last resort if two do not fit.
            too_few = isinstance(error, ValueError) and size < MIN_TRIAL_BATCH_SIZE
            if oom_location(error) is None and not too_few:
                raise
            seconds = math.inf
        if seconds == math.inf:
            # Outside of the except clause, because the traceback keeps the tensors of the failed step alive. DDP cannot
            # continue after an interrupted backward pass, so everything is built again.
            self._release()
            return False
        return self._plan.on_gpu or seconds <= MAX_CPU_STEP_SECONDS or size <= MIN_TRIAL_BATCH_SIZE

    def _step_seconds(self, size: int) -> float:
        """Return the time of the fastest step in seconds. Raises torch's errors."""
        trainer = self._trainer or build_trial(
            self._config, self._plan, self._source, self._world_size, self._local_rank
        )
        self._trainer, data = trainer, trainer.data
        shape = (size * self._plan.devices_per_rank, data.image_format.channels, *2 * (data.image_format.size,))
        images = torch.rand(shape, device=data.batch_device).contiguous(memory_format=trainer.model.memory_format)
        last = DeviceBatch(images, trainer.model.task.example_targets(len(images)).to(data.batch_device), 1.0)
        step = [replace(last, ends_step=False)] * (self._config.optim.accumulate - 1) + [last]
        data.batches = cast(DeviceLoader, cycle(step))
        # The learning rates of the user's own schedule end with the run.
        data.start_epoch(1)
        seconds = []
        for _ in range(TRIAL_STEPS):
            began = time.perf_counter()
            train_step(trainer)
            if self._plan.on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        if data.image_format.val_size > data.image_format.size:
            # Larger images in evaluation can need more memory than a training step, although without gradients.
            model, shape = trainer.model, (size, data.image_format.channels, *2 * (data.image_format.val_size,))
            model.network.eval()
            with torch.no_grad(), model.autocast():
                model.compute_logits(model.network, torch.rand(shape, device=trainer.device))
            model.train()
        return min(seconds)

    def _release(self) -> None:
        """Release the memory of the last trial, and leave its process group."""
        self._trainer = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._plan.on_gpu:
            torch.cuda.empty_cache()

    def end(self) -> None:
        """Leave this process as it was before the trials."""
        self._release()
        # A process group of one chooses loopback.
        for name in os.environ.keys() - self._environ.keys():
            del os.environ[name]
        for index in self._plan.device_indices(self._local_rank) if self._plan.on_gpu else ():
            torch.cuda.set_per_process_memory_fraction(1.0, index)


def build_trial(
    config: Config, plan: NodePlan, source: ImageSource, world_size: int = 1, local_rank: int = 0
) -> Trainer:
    """Build what a rank of a run trains, DDP's gradient buckets among it, as the only rank of a process group.

    Raises UsageError and torch's errors."""
    image_format = model_input_format(config, source)
    sampler = build_sampler(config, source, world_size, devices_per_rank=plan.devices_per_rank)
    channel = Channel(None, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    pipeline = InputPipeline(FIXED_PIPELINE, source, config, image_format, ())
    torch.set_num_threads(plan.threads_per_rank)
    rank_info = RankInfo(0, 1, local_rank, plan.local_world_size)
    job, store = Job(config, plan, None, False, source), dist.HashStore()
    return build_trainer(job, rank_info, store, channel, sampler, pipeline)


def _without_delays(config: Config, batch_size: int) -> Config:
    """Return the config without features that need other ranks, or that take time but no device memory.

    The learning rate is low enough to keep the weights finite."""
    changes: Mapping[str, Mapping[str, object]] = {
        "augment": AugmentConfig(mixup=config.augment.mixup, cutmix=config.augment.cutmix).model_dump(),
        "model": {"weights": None},
        "data": {
            "batch_size": batch_size,
            # The largest size decides.
            "image_size": config.data.max_train_size,
            "size_schedule": (),
            "val_crop": config.data.val_crop or config.data.image_size,
        },
        # The second micro-batch adds to the gradients of the first; a third needs no more memory.
        "optim": {"lr": 1e-9, "accumulate": min(config.optim.accumulate, 2)},
        "run": {"log_every": 1000},
    }
    # In a single process, not compiled.
    single = config.with_values(device={"init_method": "auto"}, model={"compile": False, "sync_bn": False})
    return single.with_values(**changes)
