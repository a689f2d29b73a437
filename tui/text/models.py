"""The table of `gputrain models`, printed line by line: the parameters of some models may still be to count."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import typer

from engine.models.catalog import (
    SOURCES,
    KnownModel,
    builtin_models,
    library_models,
    library_version,
    matching,
)
from engine.utils.errors import not_installed
from engine.utils.text import printable
from tui.text.tables import NONE

HEADER = ("SOURCE", "NAME", "PARAMETERS", "TOP-1", "WEIGHTS")
PARAMETER_COLUMNS = len("1,000,000,000")
# So many are counted in about a second, which needs no word.
FEW = 10
NEAREST = 5


def known_models(source: str | None) -> list[KnownModel]:
    """Those of one source, or of all that are installed. Raises UsageError."""
    found: list[KnownModel] = []
    for one in SOURCES if source is None else (source,):
        if one == "builtin":
            found += builtin_models()
        elif source is None and library_version(one) is None:
            typer.echo(not_installed(one), err=True)
        else:
            found += library_models(one)
    return found


def tell_count(source: str, missing: int) -> None:
    if missing > FEW:
        typer.echo(
            f"counting the parameters of {missing:,} models of {source}, once for this version of it; "
            "Ctrl-C ends that and keeps what is counted",
            err=True,
        )


def print_models(found: Sequence[KnownModel], counted: Iterable[KnownModel]) -> None:
    """`counted` are those `found`, each as soon as its parameters are known."""
    names = max(len(HEADER[1]), *(len(model.name) for model in found))
    sources = max(len(HEADER[0]), *(len(model.source) for model in found))

    def echo(source: str, name: str, parameters: str, top1: str, weights: str) -> None:
        line = f"{source:<{sources}}  {name:<{names}}  {parameters:>{PARAMETER_COLUMNS}}  {top1:>5}  {weights}"
        typer.echo(printable(line.rstrip()))

    echo(*HEADER)
    for model in counted:
        parameters = NONE if model.parameters is None else f"{model.parameters:,}"
        top1 = NONE if model.top1 is None else f"{model.top1:.1f}"
        echo(model.source, model.name, parameters, top1, weights_in_words(model.weights))


def weights_in_words(weights: Sequence[str]) -> str:
    """The library's choice, and how many there are besides."""
    if not weights:
        return NONE
    # timm leaves the tag of some weights empty.
    first = weights[0] or "yes"
    return first if len(weights) == 1 else f"{first} (+{len(weights) - 1})"


def nothing_found(known: Sequence[KnownModel], wanted: str | None, *, pretrained: bool) -> str:
    """What there is instead."""
    if pretrained and matching(known, wanted):
        return (
            f"no model with {wanted!r} in its name has pretrained weights" if wanted else "none has pretrained weights"
        )
    near = difflib.get_close_matches((wanted or "").lower(), [model.name for model in known], NEAREST, 0.4)
    # One name may be that of two sources.
    hint = f"; near to it are {', '.join(dict.fromkeys(near))}" if near else ""
    return f"no model has {wanted!r} in its name{hint}"
