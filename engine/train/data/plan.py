"""Decide how the ranks of a run load their images: from memory or as a stream, and with how many workers.

Rank 0 plans for all ranks (`engine.train.loop.train`), and `engine.train.data.device` loads images as planned.
Preflight uses `choose_pipeline`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.base.codec import Count, Record
from engine.base.errors import Problem, UsageError
from engine.base.files import cache_folder
from engine.base.host import free_bytes, free_memory
from engine.base.units import format_bytes
from engine.config.data_sections import ENCODED_DATASETS
from engine.config.pipeline import PipelineName
from engine.config.rules import ORIGINAL_SIZE_REASONS, key_of_image_transform, key_of_original_size
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.train.data.decoded import MemoryPart, memory_parts
from engine.train.data.sampler import BatchRequest
from engine.train.data.sources.base import EncodedSource, ImageFormat, ImageSource
from engine.train.data.sources.decoded_cache import read_cached
from engine.train.data.sources.formats import model_input_format

if TYPE_CHECKING:
    from engine.train.data.batch import BatchDataset

# Share of the free host memory, or of the free disk space of the cache, that decoded images may use.
MAX_FREE_SHARE = 0.25
# Of the 1.1 ms that a photo of 500x375 takes, about 0.15 ms hold the GIL: 4 threads hold it half of the time.
MAX_THREADS_PER_PROCESS = 4

SHM_PATH = Path("/dev/shm")  # noqa: S108 (a mount point, not a temporary file)
LABEL_BYTES = 8  # one int64 label
# Batches whose images the rank still copies to the device while its workers load the next ones.
RANK_BATCHES = 2
# Segments of NCCL in /dev/shm per rank: the pool of its proxy thread (ncclProxyOpsPool, src/include/proxy.h), and
# without peer-to-peer access the buffers of four connections (src/transport/shm.cc; NVIDIA/nccl#1518).
NCCL_BYTES_PER_RANK = 33_030_528 + 4 * 9_637_888

# Workers are forked before the process initializes CUDA, so the real step time is not known yet. Few models have
# shorter steps.
MIN_STEP_SECONDS = 0.01
# Time to send a batch from a worker to its rank. A batch that loads faster than this is loaded in the rank itself.
BATCH_HANDOVER_SECONDS = 0.001
MEASUREMENT_SECONDS = 0.05


class InputPlan(Record, frozen=True):
    """The input pipeline of all ranks of a run.

    `reason` is a clause to print after "memory: " or "stream: ". `workers` is the number of decode threads or of
    DataLoader workers per rank; without any, the rank loads images itself. `warnings` are for the log.
    """

    pipeline: PipelineName
    reason: str
    workers: Count = 0
    warnings: tuple[Problem, ...] = ()


def plan_input(
    config: Config,
    source: ImageSource,
    first: BatchRequest,
    *,
    local_world_size: int,
    cores_per_rank: int,
    uses_nccl: bool,
) -> InputPlan:
    """Plan the input of `local_world_size` ranks on each node, whose first batch of training is `first`.

    Raises UsageError if `data.pipeline` is memory and the images do not fit.
    """
    plan, workers, batches = choose_pipeline(config, source, local_world_size), 0, 0
    if plan.pipeline == "stream":
        requested = config.data.workers
        workers = _measure_workers(config, source, first, cores_per_rank) if requested == "auto" else requested
    if workers and not uses_threads(config):
        size = batch_bytes(len(first.indices), model_input_format(config, source))
        # The rank receives one more while it still has its own.
        batches = local_world_size * size * (workers * config.data.prefetch + RANK_BATCHES + 1)
    warnings = [*_pipeline_warnings(config, plan)]
    with suppress(OSError):
        nccl = local_world_size * NCCL_BYTES_PER_RANK if uses_nccl else 0
        warnings += shm_shortage(batches, nccl, free_bytes(SHM_PATH))
    return InputPlan(plan.pipeline, plan.reason, workers, tuple(warnings))


def choose_pipeline(config: Config, source: ImageSource, local_world_size: int) -> InputPlan:
    """Return the plan for `local_world_size` ranks on this node, still without workers. Raises UsageError as
    `plan_input`."""
    requested = config.data.pipeline
    if requested in ("stream", "fixed"):
        return InputPlan(requested, "set by data.pipeline")
    parts = memory_parts(source, config, model_input_format(config, source))
    size = sum(prod(part.shape) for part in parts)
    reason = _reason_to_stream(config, source) if requested == "auto" else None
    # The ranks of a node map the same cached array; without a cache, each rank holds its own copy.
    is_shared = isinstance(source, EncodedSource) or parts[0].cache_key
    reason = reason or _memory_shortage(size if is_shared else size * local_world_size)
    if requested == "auto":
        reason = reason or _disk_shortage(size, parts)
        return (
            InputPlan("stream", reason)
            if reason
            else InputPlan("memory", f"the decoded images take {format_bytes(size)}")
        )
    if reason is not None:
        advice = "set data.pipeline=stream or reduce data.image_size"
        raise UsageError.one("data.pipeline", f"memory is impossible: {reason}", advice, code="not-supported")
    return InputPlan("memory", "set by data.pipeline")


def _reason_to_stream(config: Config, source: ImageSource) -> str | None:
    """Return why workers are preferable even if the images fit in memory; None if they are not."""
    if is_user_code(config.data.dataset):
        return "user datasets may generate items at random"
    if not source.in_memory and (key := key_of_original_size(config)) is not None:
        return f"{key} {ORIGINAL_SIZE_REASONS[key]}"
    if key_of_image_transform(config) is not None:
        return "augmentation runs per image, which DataLoader workers do in parallel"
    return None


def _memory_shortage(size_bytes: int) -> str | None:
    """Return why decoded images of this size do not fit in the free host memory; None if they fit."""
    free, _ = free_memory()
    if size_bytes <= MAX_FREE_SHARE * free:
        return None
    sizes = f"{format_bytes(size_bytes)}, more than a quarter of the {format_bytes(free)}"
    return f"the decoded images take {sizes} of free memory"


def _disk_shortage(size_bytes: int, parts: Sequence[MemoryPart]) -> str | None:
    """Return why decoded images that are not cached yet do not fit on the disk of the cache; None if they fit."""
    try:
        if all(not (key := part.cache_key) or read_cached(key) for part in parts):
            return None
        free = free_bytes(cache_folder())
    except OSError as error:
        return f"{error.filename} cannot be accessed ({error.strerror})"
    if size_bytes <= MAX_FREE_SHARE * free:
        return None
    place = f"{format_bytes(size_bytes)} in {cache_folder()}"
    return f"the decoded images take {place}, more than a quarter of the {format_bytes(free)} of free space"


def _pipeline_warnings(config: Config, plan: InputPlan) -> Iterator[Problem]:
    """Yield warnings about config keys that the pipeline ignores and about results that mean nothing."""
    if plan.pipeline == "fixed":
        reason = "data.pipeline=fixed repeats a single batch: the trained weights and the accuracy are meaningless"
        yield Problem("", reason, code="repeated-batch")
    workers = config.data.workers
    # `engine.config.effects` warns of it if the pipeline was set.
    if config.data.pipeline == "auto" and plan.pipeline == "memory" and workers != "auto" and workers > 0:
        reason = f"data.workers={workers} has no effect in the memory pipeline ({plan.reason})"
        yield Problem("", reason, "set data.pipeline=stream to load with workers", code="no-effect")


def uses_threads(config: Config) -> bool:
    """Whether images are loaded by decode threads instead of DataLoader workers (`data.worker_type`).

    auto takes threads for image files that are only decoded, cropped and resized, all of which release the GIL.
    Measured on 2 cores: 2 threads load 0.82 to 1.07 times the images per second of 2 DataLoader workers. Their process
    and the rank have 38 MiB of own memory, not 67 or more. Two processes of one thread each load 1.02 to 1.29 times the
    images of 2 threads: threads wait for the GIL.
    """
    data = config.data
    if data.worker_type != "auto":
        return data.worker_type == "threads"
    return data.dataset in ENCODED_DATASETS and key_of_image_transform(config) is None


def loader_processes(config: Config, workers: int) -> int:
    """Return the number of loader processes per rank for this many DataLoader workers or decode threads."""
    return ceil(workers / MAX_THREADS_PER_PROCESS) if uses_threads(config) else workers


def auto_workers(cores: int, batch_size: int) -> int:
    """Upper bound of workers per rank for `data.workers=auto`: all `cores` of the rank.

    On hosts with 12 to 24 cores a GPU, fewer cannot feed a ResNet-18, or epochs of 160 pixels.
    """
    return max(1, min(cores, batch_size))


def _measure_workers(config: Config, source: ImageSource, first: BatchRequest, cores: int) -> int:
    """Return how many workers keep up with steps of `MIN_STEP_SECONDS`, as far as the cores of a rank suffice.

    The result does not affect what is trained.
    """
    # It imports torch.
    from engine.train.data.batch import BatchDataset

    max_workers = auto_workers(cores, len(first.indices))
    try:
        dataset = BatchDataset(source, config, model_input_format(config, source))
        seconds = measure_batch_seconds(dataset, first)
    except Exception:
        # The error recurs during training, where it is reported with the failing image.
        return max_workers
    return 0 if seconds < BATCH_HANDOVER_SECONDS else min(max_workers, ceil(seconds / MIN_STEP_SECONDS))


def measure_batch_seconds(dataset: BatchDataset, request: BatchRequest) -> float:
    """Return the time to load the batch of a request in this process, in seconds.

    Extrapolates from the images that load within `MEASUREMENT_SECONDS`. The first one is not measured: it includes
    imports and opening files.
    """
    from engine.train.data.augment.augmentation import single_torch_thread

    with single_torch_thread():
        dataset[replace(request, indices=request.indices[-1:])]
        started, loaded = time.perf_counter(), 0
        while loaded < len(request.indices) and time.perf_counter() - started < MEASUREMENT_SECONDS:
            part = request.indices[loaded : 2 * loaded + 1]
            dataset[replace(request, indices=part)]
            loaded += len(part)
        return (time.perf_counter() - started) * len(request.indices) / loaded


def batch_bytes(batch_size: int, image_format: ImageFormat) -> int:
    """Return the size of a batch in bytes, with its labels."""
    pixels = image_format.channels * max(image_format.size, image_format.val_size) ** 2
    return batch_size * (pixels * np.dtype(image_format.dtype).itemsize + LABEL_BYTES)


def shm_shortage(batches: int, nccl: int, available: int) -> Iterator[Problem]:
    """Yield a shortage if batches and NCCL need more shared memory than is available, all in bytes.

    A DataLoader worker that writes to a full /dev/shm is killed by SIGBUS.
    """
    if (needed := batches + nccl) > available:
        users = [*(["the batches of the DataLoader workers"] if batches else []), *(["NCCL"] if nccl else [])]
        free, used = format_bytes(available), format_bytes(needed)
        yield Problem(
            "",
            f"{SHM_PATH} has {free} free, but {' and '.join(users)} can take {used}",
            f"{'reduce data.workers or data.prefetch, or ' if batches else ''}increase the shared memory "
            f"(docker run --shm-size={ceil(1.5 * needed / 2**30)}g)",
            code="shm-full",
        )
