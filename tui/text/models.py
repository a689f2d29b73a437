"""Prints the table of `gputrain models` line by line, because counting parameters can take minutes."""

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
)
from engine.utils.errors import Problem, UsageError
from engine.utils.text import printable
from tui.text.tables import UNKNOWN

HEADER = ("SOURCE", "NAME", "PARAMETERS", "TOP-1", "WEIGHTS")
PARAMETER_COLUMNS = len("1,000,000,000")
# Counting this many models takes about a second and needs no message.
MAX_SILENT_COUNT = 10
MAX_SUGGESTIONS = 5


def list_models(source: str | None) -> list[CatalogModel]:
    """Return the models of one source, or of all sources that work, and print why the others do not.

    Raises UsageError if `source` is missing or broken."""
    if source is not None:
        return builtin_models() if source == "builtin" else library_models(source)
    models = builtin_models()
    for name in MODEL_SOURCES[1:]:
        try:
            models += library_models(name)
        except UsageError as error:
            announce_problem(error.problems[0])
    return models


def announce_problem(problem: Problem) -> None:
    """Print why the models of a library cannot be used."""
    typer.echo(printable(problem.message), err=True)


def announce_parameter_count(source: str, missing: int) -> None:
    """Print a notice before counting the parameters of many models."""
    if missing > MAX_SILENT_COUNT:
        typer.echo(
            f"Counting the parameters of {missing:,} {source} models, once per installed version. "
            "Ctrl-C stops; finished counts are kept.",
            err=True,
        )


def print_models(models: Sequence[CatalogModel], counted_models: Iterable[CatalogModel]) -> None:
    """Print the table; `counted_models` yields each of `models` as soon as its parameters are counted."""
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
    """Return the default weights of the library and the number of alternatives."""
    if not weights:
        return UNKNOWN
    # Some timm weights have an empty tag.
    first = weights[0] or "yes"
    return first if len(weights) == 1 else f"{first} (+{len(weights) - 1})"


def no_match_message(available: Sequence[CatalogModel], pattern: str | None, *, pretrained: bool) -> str:
    """Return why no model matches, with the nearest names."""
    if pretrained and filter_models(available, pattern):
        return (
            f"no model with {pattern!r} in its name has pretrained weights"
            if pattern
            else "no model has pretrained weights"
        )
    similar = difflib.get_close_matches(
        (pattern or "").lower(), [model.name for model in available], MAX_SUGGESTIONS, 0.4
    )
    # Two sources can have a model of the same name.
    hint = f"; similar names: {', '.join(dict.fromkeys(similar))}" if similar else ""
    return f"no model has {pattern!r} in its name{hint}"
