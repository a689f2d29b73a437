"""The helper process that finds `data.batch_size: auto`: it builds what a rank would, and trains it on made-up images,
more and more of them at once, until its memory is full."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from engine.config.data_sections import AugmentConfig
from engine.config.loader import validate_config
from engine.config.schema import Config
from engine.data.batching import build_sampler
from engine.data.pipelines.choose import PipelineChoice
from engine.data.pipelines.input_pipeline import InputPipeline
from engine.data.pipelines.memory import MAX_FREE_GPU_MEMORY_SHARE
from engine.data.sampler import BatchRequest
from engine.data.sources.base import ImageFormat
from engine.data.sources.builtin import FakeSource
from engine.data.sources.open import open_source
from engine.distributed.channel import DirectChannel, StopFlag
from engine.distributed.failures import describe_cause, oom_location
from engine.distributed.node_plan import NodePlan
from engine.distributed.rank_env import RankInfo
from engine.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.launch.batch_size import (
    BATCH_SIZE_KEY,
    MAX_CPU_BATCH_SIZE,
    MAX_CPU_STEP_SECONDS,
    MAX_MEMORY_SHARE,
    BatchSizeLimit,
    BatchSizeResult,
    image_metadata,
    with_batch_size,
)
from engine.runs.control import RequestCounters
from engine.training.job import Job
from engine.training.loop import train_step
from engine.training.rank_state import Position, RankState
from engine.training.train import TrainingData, build_trainer
from engine.utils.errors import UsageError
from engine.utils.helper_process import ParentPipe
from engine.utils.host import format_bytes

# The first step makes the optimizer's state, which is there throughout the second.
TRIAL_STEPS = 2
FIXED_PIPELINE = PipelineChoice("fixed", "one batch is as good as another")
# Of one image BatchNorm can take no statistics where it has come to one pixel.
FIRST_BATCH_SIZE = 2

TrialOutcome = Literal["fits", "full", "slow"]


def main(parent: ParentPipe) -> None:
    """Answers with ever better batch sizes, or with what is wrong."""
    question = parent.receive()
    try:
        config, plan = validate_config(question["config"]), NodePlan(**question["plan"])
        images = question["images"] or image_metadata(config, open_source(config))
        most = images["train"] // (question["world_size"] * plan.devices_per_rank * config.optim.accumulate)
        trials = BatchSizeTrials(config, plan, synthetic_source(images), question["memory"], images["bytes"])
        found: BatchSizeResult | None = None
        limit: BatchSizeLimit = "data"
        if most > MAX_CPU_BATCH_SIZE and not plan.on_gpu:
            most, limit = MAX_CPU_BATCH_SIZE, "time"
        for found in search_batch_size(trials, max(most, 1), limit):
            parent.send(asdict(found))
        if found is None:
            room = (
                "a GPU's free memory" if plan.on_gpu else f"the {format_bytes(question['memory'])} that a rank may take"
            )
            what = f"auto: not even one image fits into {room}; give another model.name or data.image_size"
            raise UsageError.one(BATCH_SIZE_KEY, what if plan.on_gpu else f"{what}, or fewer device.ranks")
    except UsageError as error:
        parent.send({"problems": [[problem.location, problem.message] for problem in error.problems]})
    except Exception as error:
        parent.send(
            {"problems": [[BATCH_SIZE_KEY, f"auto could not be found: {describe_cause(error)}; give a number"]]}
        )


def search_batch_size(
    trial: Callable[[int], TrialOutcome], max_batch_size: int, limited_by: BatchSizeLimit
) -> Iterator[BatchSizeResult]:
    """Each better answer: twice as many images until they do not fit, then half of what is between, down to multiples
    of 8 and to a sixteenth. `limited_by` is why there are no more than `max_batch_size`."""
    fits, full = 0, min(FIRST_BATCH_SIZE, max_batch_size)
    while (outcome := trial(full)) != "full":
        if outcome == "slow":
            yield BatchSizeResult(fits or full, "time")
            return
        fits = full
        if fits == max_batch_size:
            yield BatchSizeResult(fits, limited_by)
            return
        yield BatchSizeResult(fits, "memory")
        full = min(2 * fits, max_batch_size)
    step = max(fits // 16, 8) if fits >= 32 else 1
    while full - fits > step:
        middle = fits + -(-(full - fits) // (2 * step)) * step
        if trial(middle) == "fits":
            fits = middle
            yield BatchSizeResult(fits, "memory")
        else:
            full = middle


def synthetic_source(metadata: dict[str, Any]) -> FakeSource:
    """Images that are like those of the data, and enough for each class to have one."""
    images_format, classes = ImageFormat(**metadata["format"]), tuple(map(str, range(metadata["classes"])))
    return FakeSource(images_format, classes, {"train": max(metadata["train"], len(classes)), "val": 1}, seed=0)


class BatchSizeTrials:
    """Says of a number of images a device whether a rank can train on so many. A GPU says itself when it is full; of
    the machine's memory, which has no such end, a rank on the CPU is to take no more than a share of `memory_bytes`
    bytes. `resident_bytes` bytes of images may lie on a GPU besides."""

    def __init__(
        self, config: Config, plan: NodePlan, source: FakeSource, memory_bytes: int, resident_bytes: int = 0
    ) -> None:
        self._config, self._plan, self._source, self._memory_budget_bytes = (
            _trial_config(config),
            plan,
            source,
            MAX_MEMORY_SHARE * memory_bytes,
        )
        self._state: RankState | None = None
        self._peak_bytes: dict[int, int] = {}
        if plan.on_gpu and torch.cuda.is_available():
            for place in plan.device_indices(0):
                free, total = torch.cuda.mem_get_info(place)
                taken = (
                    resident_bytes
                    if resident_bytes <= MAX_FREE_GPU_MEMORY_SHARE * free and config.data.pipeline != "stream"
                    else 0
                )
                torch.cuda.set_per_process_memory_fraction((MAX_MEMORY_SHARE * free - taken) / total, place)

    def __call__(self, batch_size: int) -> TrialOutcome:
        if self._plan.on_gpu:
            return "full" if self._step_seconds(batch_size) is None else "fits"
        if self._expected_bytes(batch_size) > self._memory_budget_bytes:
            return "full"
        reset_peak_rss()
        seconds = self._step_seconds(batch_size)
        self._peak_bytes[batch_size] = peak_rss_bytes()
        if seconds is None or self._peak_bytes[batch_size] > self._memory_budget_bytes:
            return "full"
        return "slow" if seconds > MAX_CPU_STEP_SECONDS else "fits"

    def _expected_bytes(self, batch_size: int) -> float:
        """Return the bytes that an untried larger batch would take, extrapolated from the two largest tried ones.

        Return 0 where nothing can be said, and for a batch below the largest tried one: the machine survived that one,
        and two peaks that differ by noise alone would predict too much for every smaller batch."""
        if len(self._peak_bytes) < 2 or batch_size <= max(self._peak_bytes):
            return 0.0
        (smaller, smaller_peak), (larger, larger_peak) = sorted(self._peak_bytes.items())[-2:]
        return larger_peak + max(larger_peak - smaller_peak, 0) * (batch_size - larger) / (larger - smaller)

    def _step_seconds(self, batch_size: int) -> float | None:
        """Of the fastest of some steps; None where there is no memory for one."""
        try:
            self._state = self._state or self._build_state()
            return self._time_steps(self._state, batch_size)
        except (RuntimeError, MemoryError, ValueError) as error:
            # Where two images are too many, the one that is left may be too few for BatchNorm.
            too_few = isinstance(error, ValueError) and batch_size < FIRST_BATCH_SIZE
            if oom_location(error) is None and not too_few:
                raise
        # Outside of the clause, for the error holds what was made on the way to it. DDP cannot go on from half a
        # backward, so all is built anew.
        self._state = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._plan.on_gpu:
            torch.cuda.empty_cache()
        return None

    def _build_state(self) -> RankState:
        """As the only rank of a world."""
        config, plan, source = self._config, self._plan, self._source
        shares = build_sampler(config, source, 1, devices_per_rank=plan.devices_per_rank)
        job = Job(config, plan, None, False, source)
        channel = DirectChannel(None, StopFlag(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
        input_pipeline = InputPipeline(FIXED_PIPELINE, source, config, source.format, ())
        torch.set_num_threads(plan.threads_per_rank)
        rank_info, store = RankInfo(0, 1, 0, 1), dist.HashStore()
        data = TrainingData(source, shares, source.format, input_pipeline)
        return build_trainer(job, rank_info, store, channel, data, None).state

    def _time_steps(self, state: RankState, batch_size: int) -> float:
        """Seconds of the fastest of some steps. Raises torch's errors."""
        last = BatchRequest("train", 1, np.arange(batch_size * self._plan.devices_per_rank))
        step = [replace(last, ends_step=False)] * (self._config.optim.accumulate - 1) + [last]
        input_pipeline = InputPipeline(FIXED_PIPELINE, self._source, self._config, self._source.format, cycle(step))
        state.batches, state.position = input_pipeline.device_loader(state.device), Position()
        seconds = []
        for _ in range(TRIAL_STEPS):
            began = time.perf_counter()
            train_step(state)
            if self._plan.on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds)


def reset_peak_rss() -> None:
    """Let `peak_rss_bytes` begin anew, with what was freed given back to the system: proc_pid_clear_refs(5),
    malloc_trim(3). Where that cannot be had the peak is one of before, and the batch found the smaller."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Bytes of memory that this process had at its most."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) << 10 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _trial_config(config: Config) -> Config:
    """The same, but for what costs time and no memory of the device, or needs other ranks; and with a learning rate
    that leaves the weights finite."""
    augment = AugmentConfig(mixup=config.augment.mixup, cutmix=config.augment.cutmix)
    changes = {
        "device": {"init_method": "auto"},
        "model": {"sync_bn": False, "weights": None, "compile": False},
        # The second batch of a step is added to what the first one left; a third finds the same.
        "optim": {"lr": 1e-9, "accumulate": min(config.optim.accumulate, 2)},
        "run": {"log_every": 1000},
    }
    update: dict[str, Any] = {name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()}
    return with_batch_size(config.model_copy(update=update | {"augment": augment}), FIRST_BATCH_SIZE)
