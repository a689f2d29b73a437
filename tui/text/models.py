"""The table of `gputrain models`, printed line by line: the parameters of some models may still be to count."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import typer

from engine.models.catalog import (
    MODEL_SOURCES,
    CatalogModel,
    builtin_models,
    filter_models,
    library_models,
    library_version,
)
from engine.utils.errors import not_installed
from engine.utils.text import printable
from tui.text.tables import UNKNOWN

HEADER = ("SOURCE", "NAME", "PARAMETERS", "TOP-1", "WEIGHTS")
PARAMETER_COLUMNS = len("1,000,000,000")
# So many are counted in about a second, which needs no word.
MAX_SILENT_COUNT = 10
MAX_SUGGESTIONS = 5


def list_models(source: str | None) -> list[CatalogModel]:
    """Those of one source, or of all that are installed. Raises UsageError."""
    found: list[CatalogModel] = []
    for one in MODEL_SOURCES if source is None else (source,):
        if one == "builtin":
            found += builtin_models()
        elif source is None and library_version(one) is None:
            typer.echo(not_installed(one), err=True)
        else:
            found += library_models(one)
    return found


def announce_parameter_count(source: str, missing: int) -> None:
    if missing > MAX_SILENT_COUNT:
        typer.echo(
            f"counting the parameters of {missing:,} models of {source}, once for this version of it; "
            "Ctrl-C ends that and keeps what is counted",
            err=True,
        )


def print_models(models: Sequence[CatalogModel], counted_models: Iterable[CatalogModel]) -> None:
    """Print a table; `counted_models` are the same `models`, each as soon as its parameters are counted."""
    names = max(len(HEADER[1]), *(len(model.name) for model in models))
    sources = max(len(HEADER[0]), *(len(model.source) for model in models))

    def echo(source: str, name: str, parameters: str, top1: str, weights: str) -> None:
        line = f"{source:<{sources}}  {name:<{names}}  {parameters:>{PARAMETER_COLUMNS}}  {top1:>5}  {weights}"
        typer.echo(printable(line.rstrip()))

    echo(*HEADER)
    for model in counted_models:
        parameters = UNKNOWN if model.parameters is None else f"{model.parameters:,}"
        top1 = UNKNOWN if model.top1 is None else f"{model.top1:.1f}"
        echo(model.source, model.name, parameters, top1, format_weights(model.weights))


def format_weights(weights: Sequence[str]) -> str:
    """The library's choice, and how many there are besides."""
    if not weights:
        return UNKNOWN
    # timm leaves the tag of some weights empty.
    first = weights[0] or "yes"
    return first if len(weights) == 1 else f"{first} (+{len(weights) - 1})"


def no_match_message(known: Sequence[CatalogModel], pattern: str | None, *, pretrained: bool) -> str:
    """What there is instead."""
    if pretrained and filter_models(known, pattern):
        return (
            f"no model with {pattern!r} in its name has pretrained weights"
            if pattern
            else "none has pretrained weights"
        )
    near = difflib.get_close_matches((pattern or "").lower(), [model.name for model in known], MAX_SUGGESTIONS, 0.4)
    # One name may be that of two sources.
    hint = f"; near to it are {', '.join(dict.fromkeys(near))}" if near else ""
    return f"no model has {pattern!r} in its name{hint}"
