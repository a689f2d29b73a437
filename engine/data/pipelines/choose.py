"""Which way images take to the model: held in memory, or streamed by loader processes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from engine.config.pipeline import PIPELINE_ASKED, Pipeline
from engine.config.schema import Config
from engine.config.user_code import is_own
from engine.data.limits import wants_workers
from engine.data.pipelines.in_memory_images import held_bytes, is_shared, kept_keys
from engine.data.sampler import PARTS
from engine.data.sources.base import ImageFormat, Source
from engine.data.sources.builtin import IMAGE_SETS
from engine.data.sources.decoded_cache import is_kept, why_not_kept
from engine.data.sources.formats import image_format, likely_format
from engine.utils.errors import Problem, UsageError, collecting
from engine.utils.files import cache_folder
from engine.utils.host import free_bytes, free_memory, in_bytes

# Of what is free, for the decoded images of a run.
OF_FREE = 0.25


@dataclass(frozen=True)
class Choice:
    """`why` is a clause that goes on from "memory: " or "stream: "."""

    pipeline: Pipeline
    why: str


def choose_pipeline(config: Config, source: Source, ranks: int) -> Choice:
    """For so many ranks on this host. Raises UsageError where memory was asked for and has no room."""
    asked = config.data.pipeline
    if asked in ("stream", "fixed"):
        return Choice(asked, PIPELINE_ASKED)
    wanted = image_format(config, source)
    size = held_bytes([source.count(part) for part in PARTS], config, source.format, wanted)
    reason = _against(config, source) if asked == "auto" else None
    reason = reason or no_room(size if is_shared(source) else size * ranks)
    if asked == "auto":
        reason = reason or _no_disk(size, source, config, wanted)
    reason = reason or _no_room_for_each(size, ranks, source, config, wanted)
    if asked == "memory":
        if reason is not None:
            raise UsageError([_refusal(reason)])
        return Choice("memory", PIPELINE_ASKED)
    if reason is not None:
        return Choice("stream", reason)
    return Choice("memory", f"the decoded images take {in_bytes(size)}")


def pipeline_warnings(config: Config, choice: Choice) -> list[str]:
    """What of the config comes to nothing."""
    if choice.pipeline == "fixed":
        return [
            "data.pipeline=fixed gives one batch again and again: what the run learns, and its accuracy, mean nothing"
        ]
    workers = config.data.workers
    if choice.pipeline == "memory" and workers != "auto" and workers > 0:
        return [f"data.workers={workers} is not used: {choice.why}; loader processes come with data.pipeline=stream"]
    return []


def pipeline_problems(config: Config, source: Source | None, ranks: int) -> list[Problem]:
    """Why data.pipeline memory cannot be had, as far as that is known before ranks start; `source` where it was
    opened."""
    if config.data.pipeline != "memory":
        return []
    if source is not None:
        with collecting(found := list[Problem]()):
            choose_pipeline(config, source, ranks)
        return found
    if config.data.dataset not in IMAGE_SETS:
        return []
    image_set = IMAGE_SETS[config.data.dataset]
    reason = no_room(held_bytes(image_set.counts, config, image_set.format, likely_format(config)))
    return [] if reason is None else [_refusal(reason)]


def _refusal(reason: str) -> Problem:
    return Problem("data.pipeline", f"memory cannot be had: {reason}; give stream, or a smaller data.image_size")


def _against(config: Config, source: Source) -> str | None:
    """Why a run does better with loader processes, whatever room there is."""
    if is_own(config.data.dataset):
        return "a dataset of your own may draw each item anew"
    if config.augment.resized_crop and not source.in_memory:
        return "augment.resized_crop cuts images at the size of their files"
    if wants_workers(config, in_memory=True):
        return "each image is distorted by itself, which loader processes share"
    return None


def no_room(size: int) -> str | None:
    free, _ = free_memory()
    if size <= OF_FREE * free:
        return None
    return f"the decoded images take {in_bytes(size)}, and a quarter of the {in_bytes(free)} of free memory is allowed"


def _no_disk(size: int, source: Source, config: Config, wanted: ImageFormat) -> str | None:
    """For what is still to be written into the cache."""
    try:
        if not _is_to_be_kept(source, config, wanted):
            return None
        free = free_bytes(cache_folder())
    except OSError as error:
        return f"{error.filename} cannot be looked at ({error.strerror})"
    if size <= OF_FREE * free:
        return None
    return (
        f"the decoded images take {in_bytes(size)} in {cache_folder()}, and a quarter of the {in_bytes(free)} that is "
        "free there is allowed"
    )


def _no_room_for_each(size: int, ranks: int, source: Source, config: Config, wanted: ImageFormat) -> str | None:
    """For ranks of which each holds the images for itself, where they cannot be kept in the cache."""
    lack = no_room(size * ranks)
    with suppress(OSError):
        if lack is not None and _is_to_be_kept(source, config, wanted) and (why := why_not_kept(size)) is not None:
            return f"{lack}: each of {ranks} ranks needs its own, for they {why}"
    return None


def _is_to_be_kept(source: Source, config: Config, wanted: ImageFormat) -> bool:
    """Whether something is still to be written into the cache. Raises OSError."""
    return is_shared(source) and not all(map(is_kept, kept_keys(source, config, wanted)))
