"""Which way images take to the model: held in memory, or streamed by loader processes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from engine.config.pipeline import PIPELINE_FROM_CONFIG, PipelineName
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.limits import needs_workers
from engine.data.pipelines.in_memory_images import cache_keys, in_memory_bytes, uses_shared_cache
from engine.data.sampler import PARTS
from engine.data.sources.base import ImageFormat, ImageSource
from engine.data.sources.builtin import TORCHVISION_DATASETS
from engine.data.sources.decoded_cache import cache_write_problem, is_cached
from engine.data.sources.formats import expected_input_format, model_input_format
from engine.utils.errors import Problem, UsageError, collect_problems
from engine.utils.files import cache_folder
from engine.utils.host import format_bytes, free_bytes, free_memory

# Of what is free, for the decoded images of a run.
MAX_FREE_SHARE = 0.25


@dataclass(frozen=True)
class PipelineChoice:
    """`why` is a clause that goes on from "memory: " or "stream: "."""

    pipeline: PipelineName
    why: str


def choose_pipeline(config: Config, source: ImageSource, local_world_size: int) -> PipelineChoice:
    """For so many ranks on this host. Raises UsageError where memory was asked for and has no room."""
    asked = config.data.pipeline
    if asked in ("stream", "fixed"):
        return PipelineChoice(asked, PIPELINE_FROM_CONFIG)
    wanted = model_input_format(config, source)
    size = in_memory_bytes([source.num_images(part) for part in PARTS], config, source.format, wanted)
    reason = _reason_to_stream(config, source) if asked == "auto" else None
    reason = reason or memory_shortage(size if uses_shared_cache(source) else size * local_world_size)
    if asked == "auto":
        reason = reason or _disk_shortage(size, source, config, wanted)
    reason = reason or _uncached_memory_shortage(size, local_world_size, source, config, wanted)
    if asked == "memory":
        if reason is not None:
            raise UsageError([_memory_problem(reason)])
        return PipelineChoice("memory", PIPELINE_FROM_CONFIG)
    if reason is not None:
        return PipelineChoice("stream", reason)
    return PipelineChoice("memory", f"the decoded images take {format_bytes(size)}")


def pipeline_warnings(config: Config, pipeline_choice: PipelineChoice) -> list[str]:
    """What of the config comes to nothing."""
    if pipeline_choice.pipeline == "fixed":
        return [
            "data.pipeline=fixed gives one batch again and again: what the run learns, and its accuracy, mean nothing"
        ]
    workers = config.data.workers
    if pipeline_choice.pipeline == "memory" and workers != "auto" and workers > 0:
        return [
            f"data.workers={workers} is not used: {pipeline_choice.why}; loader processes come with "
            "data.pipeline=stream"
        ]
    return []


def pipeline_problems(config: Config, source: ImageSource | None, local_world_size: int) -> list[Problem]:
    """Why data.pipeline memory cannot be had, as far as that is known before ranks start; `source` where it was
    opened."""
    if config.data.pipeline != "memory":
        return []
    if source is not None:
        with collect_problems(found := list[Problem]()):
            choose_pipeline(config, source, local_world_size)
        return found
    if config.data.dataset not in TORCHVISION_DATASETS:
        return []
    image_set = TORCHVISION_DATASETS[config.data.dataset]
    reason = memory_shortage(in_memory_bytes(image_set.counts, config, image_set.format, expected_input_format(config)))
    return [] if reason is None else [_memory_problem(reason)]


def _memory_problem(reason: str) -> Problem:
    return Problem("data.pipeline", f"memory cannot be had: {reason}; give stream, or a smaller data.image_size")


def _reason_to_stream(config: Config, source: ImageSource) -> str | None:
    """Why a run does better with loader processes, whatever room there is."""
    if is_user_code(config.data.dataset):
        return "a dataset of your own may draw each item anew"
    if config.augment.resized_crop and not source.in_memory:
        return "augment.resized_crop cuts images at the size of their files"
    if needs_workers(config, in_memory=True):
        return "each image is distorted by itself, which loader processes share"
    return None


def memory_shortage(size_bytes: int) -> str | None:
    free, _ = free_memory()
    if size_bytes <= MAX_FREE_SHARE * free:
        return None
    return (
        f"the decoded images take {format_bytes(size_bytes)}, and a quarter of the {format_bytes(free)} of free "
        "memory is allowed"
    )


def _disk_shortage(size_bytes: int, source: ImageSource, config: Config, target_format: ImageFormat) -> str | None:
    """For what is still to be written into the cache."""
    try:
        if not _needs_cache_write(source, config, target_format):
            return None
        free = free_bytes(cache_folder())
    except OSError as error:
        return f"{error.filename} cannot be looked at ({error.strerror})"
    if size_bytes <= MAX_FREE_SHARE * free:
        return None
    return (
        f"the decoded images take {format_bytes(size_bytes)} in {cache_folder()}, and a quarter of the "
        f"{format_bytes(free)} that is "
        "free there is allowed"
    )


def _uncached_memory_shortage(
    size_bytes: int, local_world_size: int, source: ImageSource, config: Config, target_format: ImageFormat
) -> str | None:
    """For ranks of which each holds the images for itself, where they cannot be kept in the cache."""
    lack = memory_shortage(size_bytes * local_world_size)
    with suppress(OSError):
        if (
            lack is not None
            and _needs_cache_write(source, config, target_format)
            and (why := cache_write_problem(size_bytes)) is not None
        ):
            return f"{lack}: each of {local_world_size} ranks needs its own, for they {why}"
    return None


def _needs_cache_write(source: ImageSource, config: Config, target_format: ImageFormat) -> bool:
    """Whether something is still to be written into the cache. Raises OSError."""
    return uses_shared_cache(source) and not all(map(is_cached, cache_keys(source, config, target_format)))
