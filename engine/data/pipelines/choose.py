"""Choose the input pipeline of a run: images in memory, or streamed by DataLoader workers.

Rank 0 chooses for all ranks of a run (`engine.training.train`). Preflight uses `pipeline_problems`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from engine.config.pipeline import PipelineName
from engine.config.rules import ORIGINAL_SIZE_REASONS, key_of_image_transform, key_of_original_size
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.pipelines.in_memory_images import MemoryPart, memory_parts
from engine.data.sources.base import ImageSource
from engine.data.sources.decoded_cache import is_cached
from engine.data.sources.formats import model_input_format
from engine.utils.codec import Record
from engine.utils.errors import Problem, UsageError, collect_problems
from engine.utils.files import cache_folder
from engine.utils.host import free_bytes, free_memory
from engine.utils.units import format_bytes

# Share of the free host memory, or of the free disk space of the cache, that decoded images may use.
MAX_FREE_SHARE = 0.25
_SET_BY_USER = "set by data.pipeline"


class PipelineChoice(Record, frozen=True):
    """An input pipeline and the reason for it. `reason` is a clause to print after "memory: " or "stream: "."""

    pipeline: PipelineName
    reason: str


def choose_pipeline(config: Config, source: ImageSource, local_world_size: int) -> PipelineChoice:
    """Choose the pipeline of a run with `local_world_size` ranks on this node.

    Raises UsageError if `data.pipeline` is memory and the images do not fit.
    """
    requested = config.data.pipeline
    if requested in ("stream", "fixed"):
        return PipelineChoice(requested, _SET_BY_USER)
    parts = memory_parts(source, config, model_input_format(config, source))
    size = sum(prod(part.shape) for part in parts)
    reason = _reason_to_stream(config, source) if requested == "auto" else None
    reason = reason or memory_shortage(size if parts[0].is_shared else size * local_world_size)
    if requested == "auto":
        reason = reason or _disk_shortage(size, parts)
    if requested == "memory":
        if reason is not None:
            advice = "set data.pipeline=stream or reduce data.image_size"
            problem = f"memory is impossible: {reason}"
            raise UsageError.one("data.pipeline", problem, advice, code="not-supported")
        return PipelineChoice("memory", _SET_BY_USER)
    if reason is not None:
        return PipelineChoice("stream", reason)
    return PipelineChoice("memory", f"the decoded images take {format_bytes(size)}")


def pipeline_warnings(config: Config, pipeline_choice: PipelineChoice) -> list[Problem]:
    """Return warnings about config keys that the pipeline ignores and about results that mean nothing."""
    if pipeline_choice.pipeline == "fixed":
        reason = "data.pipeline=fixed repeats a single batch: the trained weights and the accuracy are meaningless"
        return [Problem("", reason, code="repeated-batch")]
    workers = config.data.workers
    # `engine.config.effects` warns of it if the pipeline was set.
    if config.data.pipeline == "auto" and pipeline_choice.pipeline == "memory" and workers != "auto" and workers > 0:
        reason = f"data.workers={workers} has no effect in the memory pipeline ({pipeline_choice.reason})"
        return [Problem("", reason, "set data.pipeline=stream to load with workers", code="no-effect")]
    return []


def pipeline_problems(config: Config, source: ImageSource | None, local_world_size: int) -> list[Problem]:
    """Return why `data.pipeline=memory` is impossible, before the ranks start.

    `source` is None if preflight has not opened the dataset: the ranks report it then.
    """
    problems = list[Problem]()
    if config.data.pipeline == "memory" and source is not None:
        with collect_problems(problems):
            choose_pipeline(config, source, local_world_size)
    return problems


def _reason_to_stream(config: Config, source: ImageSource) -> str | None:
    """Return why DataLoader workers are preferable even if the images fit in memory; None if they are not."""
    if is_user_code(config.data.dataset):
        return "user datasets may generate items at random"
    if not source.in_memory and (key := key_of_original_size(config)) is not None:
        return f"{key} {ORIGINAL_SIZE_REASONS[key]}"
    if key_of_image_transform(config) is not None:
        return "augmentation runs per image, which DataLoader workers do in parallel"
    return None


def memory_shortage(size_bytes: int) -> str | None:
    """Return why decoded images of this size do not fit in the free host memory; None if they fit."""
    free, _ = free_memory()
    if size_bytes <= MAX_FREE_SHARE * free:
        return None
    return (
        f"the decoded images take {format_bytes(size_bytes)}, more than a quarter of the {format_bytes(free)} of free "
        "memory"
    )


def _disk_shortage(size_bytes: int, parts: Sequence[MemoryPart]) -> str | None:
    """Return why decoded images that are not cached yet do not fit on the disk of the cache; None if they fit."""
    try:
        if all(not (key := part.cache_key) or is_cached(key) for part in parts):
            return None
        free = free_bytes(cache_folder())
    except OSError as error:
        return f"{error.filename} cannot be accessed ({error.strerror})"
    if size_bytes <= MAX_FREE_SHARE * free:
        return None
    return (
        f"the decoded images take {format_bytes(size_bytes)} in {cache_folder()}, more than a quarter of the "
        f"{format_bytes(free)} of free space"
    )
