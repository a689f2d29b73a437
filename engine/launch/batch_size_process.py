"""Helper process of `batch_size`: trains the model on synthetic batches of increasing size."""

from __future__ import annotations

import gc
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from engine.config.data_sections import AugmentConfig
from engine.config.loader import validate_config
from engine.config.schema import Config
from engine.data.pipelines.input_pipeline import InputPipeline
from engine.data.pipelines.memory import MAX_FREE_GPU_MEMORY_SHARE
from engine.data.sampler import BatchRequest
from engine.data.sources.builtin import FakeSource
from engine.data.sources.open import open_source
from engine.distributed.failures import find_cause, oom_location
from engine.distributed.node_plan import NodePlan
from engine.launch.batch_size import (
    BATCH_SIZE_KEY,
    MAX_CPU_BATCH_SIZE,
    MAX_CPU_STEP_SECONDS,
    MAX_MEMORY_SHARE,
    NCCL_BYTES,
    BatchSizeLimit,
    BatchSizeRequest,
    BatchSizeResult,
    ImageMetadata,
    image_metadata,
)
from engine.launch.model_check import FIXED_PIPELINE, MIN_TRIAL_BATCH_SIZE, build_trial_state, trial_config
from engine.training.loop import train_step
from engine.training.memory import release_free_memory
from engine.training.rank_state import Position, RankState
from engine.training.warmup import evaluate_random_batch
from engine.utils.answers import Answer
from engine.utils.codec import replace as replace_record
from engine.utils.errors import Problem, UsageError
from engine.utils.helper_process import ParentPipe
from engine.utils.units import format_bytes

TRIAL_STEPS = 2  # the first step allocates the optimizer's state, so the second has the peak memory

TrialOutcome = Literal["fits", "full", "slow"]


def main(parent: ParentPipe) -> None:
    """Answer a request with batch sizes that fit, in increasing order, or with the problems of its config."""
    request = parent.receive(BatchSizeRequest)
    try:
        config, plan = validate_config(request.config), request.plan
        images = request.images or image_metadata(config, open_source(config))
        world_size = request.world_size
        step_images = world_size * plan.devices_per_rank * config.optim.accumulate
        max_batch_size = max(images.train // step_images, 1)
        enough = max(images.train, MIN_TRIAL_BATCH_SIZE * step_images)
        source = synthetic_source(replace_record(images, train=enough))
        trials = BatchSizeTrials(config, plan, source, request.memory_bytes, images.bytes, world_size=world_size)
        result: BatchSizeResult | None = None
        limit: BatchSizeLimit = "data"
        if max_batch_size > MAX_CPU_BATCH_SIZE and not plan.on_gpu:
            max_batch_size, limit = MAX_CPU_BATCH_SIZE, "time"
        for result in search_batch_size(trials, max_batch_size, limit):
            if not config.model.compile:
                parent.send(Answer(result))
        if config.model.compile and result is not None:
            # Compiling takes minutes per batch size, so the search without it chooses the first size.
            trials.compile_model()
            first, result = result.batch_size, None
            for result in search_batch_size(trials, max_batch_size, limit, first):
                parent.send(Answer(result))
        if result is None:
            memory = "the free memory of a GPU"
            advice = "reduce data.image_size, or use another model.name"
            if not plan.on_gpu:
                memory = f"the {format_bytes(request.memory_bytes)} available to a rank"
                advice = "reduce data.image_size or device.ranks, or use another model.name"
            raise UsageError.one(
                BATCH_SIZE_KEY, f"auto: not even one image fits into {memory}", advice, code="out-of-memory"
            )
    except UsageError as error:
        parent.send(Answer.refuse(error))
    except Exception as error:
        cause = find_cause(error)
        problem = Problem(BATCH_SIZE_KEY, f"auto failed: {cause.reason}", "set a number", code=cause.code)
        parent.send(Answer(problems=(problem,)))


def search_batch_size(
    trial: Callable[[int], TrialOutcome],
    max_batch_size: int,
    limited_by: BatchSizeLimit,
    first_batch_size: int = MIN_TRIAL_BATCH_SIZE,
) -> Iterator[BatchSizeResult]:
    """Yield larger and larger batch sizes that fit: halve until one fits, double until one does not, then bisect.

    Bisection ends at multiples of 8 and at a sixteenth of the batch size. `limited_by` is the reason for
    `max_batch_size`."""
    fits, full = min(first_batch_size, max_batch_size), 0
    while (outcome := trial(fits)) == "full":
        if fits == 1:
            return
        fits, full = fits // 2, fits
    while outcome == "fits" and not full:
        if fits == max_batch_size:
            yield BatchSizeResult(fits, limited_by)
            return
        yield BatchSizeResult(fits, "memory")
        larger = min(2 * fits, max_batch_size)
        outcome = trial(larger)
        fits, full = (larger, 0) if outcome == "fits" else (fits, larger)
    yield BatchSizeResult(fits, "time" if outcome == "slow" else "memory")
    if outcome == "slow":
        return
    step = max(fits // 16, 8) if fits >= 32 else 1
    while full - fits > step:
        middle = fits + -(-(full - fits) // (2 * step)) * step
        if trial(middle) == "fits":
            fits = middle
            yield BatchSizeResult(fits, "memory")
        else:
            full = middle


def synthetic_source(metadata: ImageMetadata) -> FakeSource:
    """Return generated images of the format that `image_metadata` describes, at least one per class."""
    classes = tuple(map(str, range(metadata.classes)))
    return FakeSource(metadata.format, classes, {"train": max(metadata.train, len(classes)), "val": 1}, seed=0)


class BatchSizeTrials:
    """Try whether a rank can train with a batch size per device.

    On a GPU the allocator reports that memory is full: it may use what the GPU with the least free memory has. Host
    memory has no such limit: the system would start to swap, so a rank on the CPU may use a share of `memory_bytes`.
    `resident_bytes` is the size of a dataset that the memory pipeline may keep on the GPU."""

    def __init__(
        self,
        config: Config,
        plan: NodePlan,
        source: FakeSource,
        memory_bytes: int,
        resident_bytes: int = 0,
        *,
        world_size: int = 1,
    ) -> None:
        self._config, self._plan, self._source, self._world_size = _trial_config(config), plan, source, world_size
        self._memory_budget_bytes = MAX_MEMORY_SHARE * memory_bytes
        self._state: RankState | None = None
        self._peak_bytes: dict[int, int] = {}
        if plan.on_gpu and torch.cuda.is_available():
            may_reside = config.data.pipeline in ("auto", "memory") and config.device.parallel == "ddp"
            # DataParallel copies the model with NCCL, without a process group.
            uses_nccl = plan.devices_per_rank > 1 or (world_size > 1 and plan.uses_nccl)
            nccl_bytes = NCCL_BYTES if uses_nccl else 0
            budget = min(
                MAX_MEMORY_SHARE * free
                - nccl_bytes
                - (resident_bytes if may_reside and resident_bytes <= MAX_FREE_GPU_MEMORY_SHARE * free else 0)
                for free in (torch.cuda.mem_get_info(index)[0] for index in range(len(plan.devices)))
            )
            for index in plan.device_indices(0):
                _, total = torch.cuda.mem_get_info(index)
                torch.cuda.set_per_process_memory_fraction(max(budget, 0) / total, index)

    def compile_model(self) -> None:
        """Compile the model in the trials that follow, each with its batch size as the run does."""
        self._config = trial_config(self._config, model={"compile": True})
        self._release()
        self._peak_bytes.clear()

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
        """Return the memory that an untried larger batch needs, extrapolated from the two largest tried ones.

        Return 0 without two measurements, and for a batch below the largest tried one, which did fit: two peaks that
        differ by noise alone would predict too much for every smaller batch."""
        if len(self._peak_bytes) < 2 or batch_size <= max(self._peak_bytes):
            return 0.0
        (smaller, smaller_peak), (larger, larger_peak) = sorted(self._peak_bytes.items())[-2:]
        return larger_peak + max(larger_peak - smaller_peak, 0) * (batch_size - larger) / (larger - smaller)

    def _step_seconds(self, batch_size: int) -> float | None:
        """Return the time of the fastest of `TRIAL_STEPS` steps; None if memory is full."""
        if self._config.model.compile:
            # A compiled model runs eagerly on any batch size but that of the config.
            self._release()
        try:
            is_compiled = self._config.model.compile
            config = self._config.with_values(data={"batch_size": batch_size}) if is_compiled else self._config
            self._state = self._state or build_trial_state(config, self._plan, self._source, self._world_size)
            return self._time_steps(self._state, batch_size)
        except (RuntimeError, MemoryError, ValueError) as error:
            # BatchNorm refuses a batch of one image, the last resort if two do not fit.
            too_few = isinstance(error, ValueError) and batch_size < MIN_TRIAL_BATCH_SIZE
            if oom_location(error) is None and not too_few:
                raise
        # Outside of the except clause, because the traceback keeps the tensors of the failed step alive. DDP cannot
        # continue after an interrupted backward pass, so everything is built again.
        self._release()
        return None

    def _release(self) -> None:
        """Release the memory of the last trial."""
        self._state = None
        if self._config.model.compile:
            torch.compiler.reset()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._plan.on_gpu:
            torch.cuda.empty_cache()

    def _time_steps(self, state: RankState, batch_size: int) -> float:
        """Return the time of the fastest step in seconds. Raises torch's errors."""
        last = BatchRequest("train", 1, np.arange(batch_size * self._plan.devices_per_rank))
        step = [replace(last, ends_step=False)] * (self._config.optim.accumulate - 1) + [last]
        input_pipeline = InputPipeline(FIXED_PIPELINE, self._source, self._config, self._source.format, cycle(step))
        state.batches, state.position = input_pipeline.device_loader(state.batch_device), Position()
        seconds = []
        for _ in range(TRIAL_STEPS):
            began = time.perf_counter()
            train_step(state)
            if self._plan.on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        if state.image_format.val_size > state.image_format.size:
            # Larger images in evaluation can need more memory than a training step, although without gradients.
            evaluate_random_batch(state, batch_size)
        return min(seconds)


def reset_peak_rss() -> None:
    """Return freed memory to the system and reset the peak of `peak_rss_bytes`: malloc_trim(3), proc_pid_clear_refs(5).

    Where neither is available, the peak includes earlier trials and the batch size becomes smaller than possible."""
    gc.collect()
    release_free_memory()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process."""
    match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(match[1]) << 10 if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _trial_config(config: Config) -> Config:
    """Return the config without features that need other ranks, or that take time but no device memory.

    The learning rate is low enough to keep the weights finite."""
    return trial_config(
        config,
        augment=AugmentConfig(mixup=config.augment.mixup, cutmix=config.augment.cutmix).model_dump(),
        model={"weights": None},
        data={
            "batch_size": MIN_TRIAL_BATCH_SIZE,
            "image_size": config.data.max_train_size,
            "size_schedule": (),
            "val_crop": config.data.val_crop or config.data.image_size,
        },
        # The second micro-batch adds to the gradients of the first; a third needs no more memory.
        optim={"lr": 1e-9, "accumulate": min(config.optim.accumulate, 2)},
        run={"log_every": 1000},
    )
