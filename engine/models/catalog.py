"""What only a library of models can tell, told without importing it: a short-lived process writes it once for each
installed version into the user's cache."""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine.config.training_sections import BUILTIN_MODELS, Model
from engine.config.user_code import is_own
from engine.utils.errors import UsageError, nearest, not_installed
from engine.utils.files import cache_folder, read_json, write_json
from engine.utils.helper_process import HelperError, ask_helper, start_helper

# In the order in which model.source auto looks through them.
SOURCES = ("builtin", "torchvision", "timm")
_HELPER_MODULE = "engine.models.catalog_process"


@dataclass(frozen=True)
class KnownModel:
    """A model of one of the `SOURCES`. `parameters` counts those of the model as its library makes it by itself, None
    where they have not been counted; `weights` are the names of its pretrained weights, the library's choice first;
    `top1` is the accuracy of these on ImageNet in percent, where the library tells it."""

    source: str
    name: str
    parameters: int | None = None
    weights: tuple[str, ...] = ()
    top1: float | None = None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def check_model_name(model: Model) -> None:
    """Raises UsageError where no model has this name. Own code (`module:name`) is not looked at."""
    if is_own(model.name):
        return
    sources = SOURCES if model.source == "auto" else (model.source,)
    known: list[str] = []
    for source in sources:
        found = names_of(source, optional=source not in (model.source, "torchvision"))
        if model.name in found:
            return
        known += found
    where = "no model" if model.source == "auto" else f"no model of {model.source}"
    others = [source for source in SOURCES if source not in sources and model.name in names_of(source, optional=True)]
    hint = f"; {others[0]} has one: model.source={others[0]}" if others else nearest(model.name, known)
    raise UsageError.one("model.name", f"{where} is called {model.name!r} (`gputrain models` lists them){hint}")


def names_of(source: str, *, optional: bool) -> list[str]:
    """What `model.name` can be for a source. Where its library is not there or does not work there are none if it is
    `optional`; else raises UsageError."""
    if source == "builtin":
        return list(BUILTIN_MODELS)
    try:
        models = library_models(source)
    except UsageError:
        if optional:
            return []
        raise
    if source == "timm":
        # Behind a dot timm's names say which weights.
        return [model.name for model in models] + [f"{one.name}.{tag}" for one in models for tag in one.weights if tag]
    return [model.name for model in models]


def library_version(source: str) -> str | None:
    """None where it is not installed. That of the built-in models changes with their code."""
    if source == "builtin":
        return f"{zlib.crc32(Path(__file__).with_name('builtin.py').read_bytes()):08x}"
    try:
        return version(source)
    except PackageNotFoundError:
        return None


def library_models(source: str) -> list[KnownModel]:
    """All classification models of torchvision or timm. Raises UsageError where the library is not there or does not
    work."""
    installed = library_version(source)
    if installed is None:
        raise UsageError.one("model.source", not_installed(source))
    path = cache_folder() / f"models-{source}-{installed}.json"
    try:
        return _as_models(read_json(path))
    except (KeyError, TypeError, ValueError):
        pass
    try:
        told = ask_helper(_HELPER_MODULE, {"task": "list", "source": source})
    except HelperError as error:
        raise UsageError.one("model.source", f"the models of {source} cannot be listed: {error}") from error
    _keep(path.name, told)
    return _as_models(told)


def _as_models(stored: dict[str, Any] | None) -> list[KnownModel]:
    """Raises KeyError, TypeError or ValueError where this is no list of models."""
    if stored is None:
        raise ValueError("there is nothing")
    return [KnownModel(**{**model, "weights": tuple(map(str, model["weights"]))}) for model in stored["known"]]


def builtin_models() -> list[KnownModel]:
    return [KnownModel("builtin", name) for name in BUILTIN_MODELS]


def matching(models: Sequence[KnownModel], wanted: str | None) -> list[KnownModel]:
    """Those whose name has `wanted` in it, or fits it where it is a pattern with `*`, `?` or `[…]`, in any case."""
    if not wanted:
        return list(models)
    pattern = wanted.lower() if any(sign in wanted for sign in "*?[") else f"*{wanted.lower()}*"
    return [model for model in models if fnmatch.fnmatchcase(model.name.lower(), pattern)]


def stored_counts(source: str) -> dict[str, int]:
    """Parameters by name, as far as they have been counted for the installed version."""
    stored = read_json(cache_folder() / _counts_file(source)) or {}
    return {name: count for name, count in stored.items() if isinstance(count, int)}


def with_parameters(models: Sequence[KnownModel], told: Callable[[str, int], None]) -> Iterator[KnownModel]:
    """The same models, by source, each as soon as its parameters are known. `told` hears of each source how many are
    to be counted."""
    for source in SOURCES:
        ours = [model for model in models if model.source == source]
        if any(model.parameters is None for model in ours):
            stored = stored_counts(source)
            ours = [model if model.parameters else replace(model, parameters=stored.get(model.name)) for model in ours]
        missing = [model.name for model in ours if model.parameters is None]
        told(source, len(missing))
        with closing(count_models(source, missing)) as counts:
            for model in ours:
                yield replace(model, parameters=next(counts)) if model.parameters is None else model


def count_models(source: str, names: Sequence[str]) -> Generator[int | None, None, None]:
    """The parameters of each, in this order, as they are counted by building it without storage; None where that fails.
    What has been counted is kept, also when it is given up half-way."""
    if not names:
        return
    counted: dict[str, int] = {}
    with start_helper(_HELPER_MODULE, keep_stderr=False) as helper:
        helper.send({"task": "count", "source": source, "names": names})
        try:
            for name in names:
                count = None
                # Once the process has ended, this is so for all that are left.
                with suppress(HelperError):
                    count = helper.receive()
                if count is not None:
                    counted[name] = count
                yield count
        finally:
            # Another may have counted others meanwhile.
            _keep(_counts_file(source), stored_counts(source) | counted)


def _counts_file(source: str) -> str:
    return f"parameters-{source}-{library_version(source)}.json"


def _keep(name: str, values: dict[str, Any]) -> None:
    # Without a cache it is asked again.
    with suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_json(cache_folder() / name, values)
