"""List the models of torchvision and timm without importing either.

A helper process, `engine.models.catalog_process`, writes the list of each installed version to the user's cache once.
The command line and the preflight use this module.
"""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Literal

from engine.config.training_sections import BUILTIN_MODELS, ModelConfig
from engine.config.user_code import is_user_code
from engine.utils.answers import Answer
from engine.utils.codec import (
    ENTRIES,
    Count,
    FileRecord,
    Number,
    Record,
    find_user_record,
    replace,
    write_user_record,
)
from engine.utils.errors import Problem, UsageError, did_you_mean, not_installed
from engine.utils.files import cache_folder
from engine.utils.helper_process import HelperError, start_helper
from engine.utils.libraries import Listing, cached_listing, installed_version

# In the search order of model.source=auto.
MODEL_SOURCES = ("builtin", "torchvision", "timm")
_HELPER_MODULE = "engine.models.catalog_process"


class CatalogModel(Record, frozen=True, kw_only=True):
    """A model of one of `MODEL_SOURCES`. `parameters` is the count of the default model, None before it is counted.
    `weights` are the names of its pretrained weights, the default first. `top1` is their ImageNet accuracy in percent,
    if the library reports it."""

    source: str
    name: str
    parameters: Count | None = None
    weights: tuple[str, ...] = ()
    top1: Number | None = None


class ModelListing(FileRecord, frozen=True, kw_only=True):
    """The classification models of one installed version of a library, in the user's cache."""

    models: Annotated[tuple[CatalogModel, ...], ENTRIES]


class ParameterCounts(FileRecord, frozen=True, kw_only=True):
    """The parameter counts of models of one installed version of a library by name, in the user's cache."""

    counts: Annotated[dict[str, Count], ENTRIES]


class CatalogRequest(Record, frozen=True, kw_only=True):
    """Request to the helper process about the models of a library."""

    task: Literal["models", "inputs", "count"]
    source: str
    names: tuple[str, ...] = ()


def check_model_name(model: ModelConfig) -> None:
    """Raise UsageError if no model has this name. User code (`module:name`) is not checked."""
    if is_user_code(model.name):
        return
    sources = MODEL_SOURCES if model.source == "auto" else (model.source,)
    candidates, unavailable = list[str](), ""
    for source in sources:
        try:
            names = model_names(source)
        except UsageError as error:
            if source in (model.source, "torchvision"):
                raise
            unavailable = f" ({error.problems[0].message})"
            continue
        if model.name in names:
            return
        candidates += names
    prefix = "no model" if model.source == "auto" else f"no model of {model.source}"
    other_sources = [source for source in MODEL_SOURCES if source not in sources and _has_model(source, model.name)]
    hint = (
        f"; {other_sources[0]} has one: model.source={other_sources[0]}"
        if other_sources
        else did_you_mean(model.name, candidates)
    )
    reason = f"{prefix} is named {model.name!r}; list them with `gputrain models`{hint}{unavailable}"
    raise UsageError.one("model.name", reason, code="unknown-value")


def _has_model(source: str, name: str) -> bool:
    """Return whether a source lists a model. False if its library is missing or broken."""
    try:
        return name in model_names(source)
    except UsageError:
        return False


def model_names(source: str) -> list[str]:
    """Return the valid values of `model.name` for a source. Raises UsageError if its library is missing or broken."""
    if source == "builtin":
        return list(BUILTIN_MODELS)
    models = library_models(source)
    if source == "timm":
        # timm selects weights by a tag after a dot.
        return [model.name for model in models] + [
            f"{model.name}.{tag}" for model in models for tag in model.weights if tag
        ]
    return [model.name for model in models]


def library_version(source: str) -> str | None:
    """Return the installed version, None if there is none. The built-in models' version is a checksum of their code."""
    if source == "builtin":
        return f"{zlib.crc32(Path(__file__).with_name('builtin.py').read_bytes()):08x}"
    return installed_version(source)


def library_models(source: str) -> list[CatalogModel]:
    """Return all classification models of torchvision or timm. Raises UsageError if the library is missing or
    broken."""
    return list(read_listing(source, "models", ModelListing).models)


def cached_model_names() -> list[str]:
    """Return the names of the built-in models and of those in the user's cache. It starts no process."""
    names = list(BUILTIN_MODELS)
    for source in MODEL_SOURCES[1:]:
        cached = find_user_record(cache_folder(), _listing_file_name("models", source), ModelListing)
        names += [] if cached is None else [model.name for model in cached.models]
    return list(dict.fromkeys(names))


def read_listing(source: str, task: Literal["models", "inputs"], kind: type[Listing]) -> Listing:
    """Return a listing of torchvision or timm from the cache, else from a helper process.

    Raises UsageError if the library is missing or broken."""
    installed = library_version(source)
    if installed is None:
        raise UsageError.one("model.source", not_installed(source), code="not-installed")
    try:
        request = CatalogRequest(task=task, source=source)
        return cached_listing(_listing_file_name(task, source), kind, _HELPER_MODULE, request)
    except HelperError as error:
        raise UsageError.one(
            "model.source", f"the models of {source} cannot be listed: {error}", code="library-failed"
        ) from error


def builtin_models() -> list[CatalogModel]:
    return [CatalogModel(source="builtin", name=name) for name in BUILTIN_MODELS]


def filter_models(models: Sequence[CatalogModel], query: str | None) -> list[CatalogModel]:
    """Return the models whose name contains `query` or matches it as a pattern with `*`, `?` or `[…]`,
    case-insensitively."""
    if not query:
        return list(models)
    pattern = query.lower() if any(sign in query for sign in "*?[") else f"*{query.lower()}*"
    return [model for model in models if fnmatch.fnmatchcase(model.name.lower(), pattern)]


def cached_parameter_counts(source: str) -> dict[str, int]:
    """Return the cached parameter counts of the installed version, by model name."""
    stored = find_user_record(cache_folder(), _counts_file_name(source), ParameterCounts)
    return {} if stored is None else stored.counts


def with_parameter_counts(
    models: Sequence[CatalogModel],
    on_count: Callable[[str, int], None],
    on_problem: Callable[[Problem], None] = lambda _: None,
) -> Iterator[CatalogModel]:
    """Yield the models grouped by source, each once its parameters are counted.

    `on_count` receives each source and the number of models left to count, `on_problem` why a library cannot be used.
    """
    for source in MODEL_SOURCES:
        of_source = [model for model in models if model.source == source]
        if any(model.parameters is None for model in of_source):
            stored = cached_parameter_counts(source)
            of_source = [
                model if model.parameters else replace(model, parameters=stored.get(model.name)) for model in of_source
            ]
        missing = [model.name for model in of_source if model.parameters is None]
        on_count(source, len(missing))
        with closing(count_model_parameters(source, missing, on_problem)) as counts:
            for model in of_source:
                yield replace(model, parameters=next(counts)) if model.parameters is None else model


def count_model_parameters(
    source: str, names: Sequence[str], on_problem: Callable[[Problem], None] = lambda _: None
) -> Generator[int | None, None, None]:
    """Yield the parameter count of each model in order, None if it cannot be built.

    Models are built on the meta device. Counts are cached even if the caller stops early. `on_problem` receives why the
    library cannot be used."""
    if not names:
        return
    counted: dict[str, int] = {}
    with start_helper(_HELPER_MODULE, keep_stderr=False) as helper:
        helper.send(CatalogRequest(task="count", source=source, names=tuple(names)))
        try:
            for name in names:
                count = None
                # After the helper has exited, every remaining count fails like this.
                with suppress(HelperError):
                    answer = helper.receive(Answer[Count])
                    count = answer.value
                    # The last answer of the helper, which then exits.
                    for problem in answer.problems:
                        on_problem(problem)
                if count is not None:
                    counted[name] = count
                yield count
        finally:
            # Another process may have added counts since.
            counts = ParameterCounts(counts=cached_parameter_counts(source) | counted)
            # A missing cache only costs time.
            with suppress(OSError):
                write_user_record(cache_folder(), _counts_file_name(source), counts)


def _listing_file_name(task: str, source: str) -> str:
    return f"{task}-{source}-{library_version(source)}.json"


def _counts_file_name(source: str) -> str:
    return f"parameters-{source}-{library_version(source)}.json"
