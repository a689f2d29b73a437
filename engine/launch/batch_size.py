"""Resolve `data.batch_size: auto`: the largest batch size per device that fits into memory.

`lifecycle` calls `find_batch_size` before the ranks start. The trials run in a helper process, `batch_size_process`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from engine.config.loader import resolve_config
from engine.config.schema import Config, as_dict
from engine.data.pipelines.in_memory_images import in_memory_bytes
from engine.data.sampler import PARTS
from engine.data.sources.base import ImageFormat, ImageSource
from engine.data.sources.formats import model_input_format
from engine.distributed.node_plan import NodePlan, prepare_environment
from engine.runs.folder import RunFolder
from engine.utils.answers import Answer
from engine.utils.codec import Count, Record
from engine.utils.errors import UsageError
from engine.utils.exits import describe_exit
from engine.utils.helper_process import HelperExitedError, HelperTimeoutError, start_helper
from engine.utils.host import free_memory
from engine.utils.text import pluralize

BATCH_SIZE_KEY = "data.batch_size"
POLL_SECONDS = 0.2
RELEASE_SECONDS = 60.0  # the helper process holds its GPU memory until it has exited
MAX_MEMORY_SHARE = 0.9  # of the free memory; the rest is for fragmentation, which a trial does not see
# NCCL's memory on each of several GPUs, not measured. Estimated from nccl#1685: up to 32 channels, two connections per
# channel, 10 MiB per connection. A trial has one rank, which allocates none of it.
NCCL_BYTES = 2 * 32 * (10 << 20)
# Host memory allows batches whose steps take minutes.
MAX_CPU_BATCH_SIZE = 4096
MAX_CPU_STEP_SECONDS = 2.0

BatchSizeLimit = Literal["memory", "data", "time"]


class BatchSizeResult(Record, frozen=True):
    """The batch size per device, and what keeps it from being larger."""

    batch_size: Count
    limited_by: BatchSizeLimit

    def describe(self, config: Config) -> str:
        unit = "GPU" if config.device.parallel == "dp" else "rank"
        reason = {
            "memory": f"about the largest batch that fits into {MAX_MEMORY_SHARE:.0%} of the free memory",
            "data": "the whole training set in one step; a smaller batch size makes more steps and may learn faster",
            "time": f"the limit on the CPU is {MAX_CPU_BATCH_SIZE} images or {MAX_CPU_STEP_SECONDS:g} s per step",
        }[self.limited_by]
        return f"{BATCH_SIZE_KEY} auto: {pluralize(self.batch_size, 'image')} per {unit}, {reason}"


class ImageMetadata(Record, frozen=True, kw_only=True):
    """What the trials need to know of the images of a dataset. `bytes` is the size of the dataset in memory."""

    format: ImageFormat
    bytes: Count
    classes: Count
    train: Count


class BatchSizeRequest(Record, frozen=True, kw_only=True):
    """Request to the helper process. Without `images` it opens the dataset."""

    config: dict[str, Any]
    plan: NodePlan
    world_size: Count
    images: ImageMetadata | None
    memory_bytes: Count


def reduced_batch_size(config: Config, train_images: int, plan: NodePlan, world_size: int) -> int | None:
    """Return the largest batch size per device that fills a step, if the default is larger; None if it fits, and for a
    batch size that is set."""
    if "batch_size" in config.data.model_fields_set or not config.data.drop_last:
        return None
    largest = train_images // (world_size * plan.devices_per_rank * config.optim.accumulate)
    return largest if 0 < largest < config.data.numeric_batch_size else None


def previous_batch_size(folder: RunFolder) -> int | None:
    """Return the batch size of a run that is resumed; None if it ended before one was found."""
    if not folder.config.exists():
        return None
    # Only read: no code that it names runs.
    size = resolve_config(str(folder.config), trust_code=True).config.data.batch_size
    return None if size == "auto" else size


def find_batch_size(
    config: Config,
    plan: NodePlan,
    world_size: int,
    source: ImageSource | None,
    on_tick: Callable[[], None] = lambda: None,
    memory_bytes: int | None = None,
) -> BatchSizeResult:
    """Search the largest batch size per device that fits on every device of this host, by training on the first.

    Without a `source` the helper process opens the dataset. `memory_bytes` limits a rank on the CPU; the default is its
    share of the free memory. `on_tick` is called repeatedly during the search. Raises UsageError if not one image fits.
    """
    request = BatchSizeRequest(
        config=as_dict(config),
        plan=replace(plan, local_world_size=1),
        world_size=world_size,
        images=None if source is None else image_metadata(config, source),
        memory_bytes=free_memory()[0] // plan.local_world_size if memory_bytes is None else memory_bytes,
    )
    environment = dict(os.environ)
    prepare_environment(plan, environment)
    helper = start_helper("engine.launch.batch_size_process", env=environment)
    result: BatchSizeResult | None = None
    try:
        helper.send(request)
        while True:
            on_tick()
            with suppress(HelperTimeoutError):
                answer = helper.receive(Answer[BatchSizeResult], POLL_SECONDS)
                result = answer.get()
    except HelperExitedError as error:
        # Each answer is better than the one before, so one that crashed on a too large batch has still answered.
        if result is None:
            end = describe_exit(error.exit_code or 0)
            reason = f"auto failed: {error.last_line or end}"
            raise UsageError.one(BATCH_SIZE_KEY, reason, "set a number", code=end.code) from error
    finally:
        helper.close(RELEASE_SECONDS)
    return result


def image_metadata(config: Config, source: ImageSource) -> ImageMetadata:
    """Describe the images of a source, so that `synthetic_source` can imitate them without the dataset."""
    image_format = model_input_format(config, source)
    return ImageMetadata(
        # The largest size decides.
        format=replace(image_format, epoch_sizes=()),
        bytes=in_memory_bytes([source.num_images(part) for part in PARTS], config, source.format, image_format),
        classes=len(source.classes),
        train=source.num_images("train"),
    )
