"""`gputrain models` lists the available models, `gputrain models show` prints the layers of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.base.errors import Problem, UsageError, did_you_mean
from engine.base.text import printable
from engine.report.table import plain_lines
from tui.cli.command import command
from tui.cli.completions import complete_config
from tui.cli.config_arguments import (
    KEY_HELP,
    FlagOverrides,
    code_trust,
    config_flags,
    print_no_effect,
    resolve_arguments,
    split_arguments,
)
from tui.cli.console import print_json
from tui.cli.options import JsonOption, TrustCodeOption

if TYPE_CHECKING:
    from engine.train.models.catalog import CatalogModel

SourceName = Literal["builtin", "torchvision", "timm"]


@command(["gputrain models resnet", "gputrain models 'vit_*_224' --source timm --pretrained"])
def list_models(
    *,
    pattern: Annotated[
        str | None, typer.Argument(metavar="[FILTER]", help="Part of the name, or a pattern such as 'vit_*_224'.")
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="List only models with pretrained weights.")] = False,
    source: Annotated[SourceName | None, typer.Option("--source", help="List only models of this source.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the available models.

    Prints pretrained weights, and parameters and ImageNet top-1 accuracy if the library publishes them.

    `gputrain models show` counts the parameters of any model.
    """
    from engine.base.codec import asdict
    from engine.train.models.catalog import filter_models

    available = find_models(source)
    matches = [model for model in filter_models(available, pattern) if model.weights or not pretrained]
    if not matches:
        from tui.screens.tables.models import no_match_message

        typer.echo(no_match_message(available, pattern, pretrained=pretrained), err=True)
        raise typer.Exit(1)
    if as_json:
        print_json({"models": [asdict(model) for model in matches]})
    else:
        from tui.screens.tables.models import MODEL_COLUMNS

        for line in plain_lines(MODEL_COLUMNS, matches):
            typer.echo(line)


@command(
    [
        "gputrain models show resnet50",
        "gputrain models show digits",
        "gputrain models show resnet50 --dataset cifar10 --forward-batch 8",
    ]
)
@config_flags("model", "dataset", "data_path", "image_size")
def show(
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL|CONFIG] [KEY=VALUE]...",
            help=f"Model name, YAML file, or preset such as digits.\n{KEY_HELP}",
            autocompletion=complete_config,
        ),
    ] = None,
    flags: FlagOverrides,
    images: Annotated[int, typer.Option("--forward-batch", metavar="N", min=1, help="Images in the forward pass.")] = 1,
    depth: Annotated[
        int,
        typer.Option("--depth", metavar="N", min=0, help="Depth of the module tree to print."),
    ] = 3,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Print the layers of a model: shapes, parameters, multiply-adds.

    Image size, channels and classes come from the configured data; without a dataset, they are those of ImageNet: 224
    pixels, 3 channels and 1,000 classes. Each row includes its submodules. Multiply-adds cover convolutions, matrix
    products and attention of the whole batch; one multiply-add is two FLOPs. No weights are loaded.
    """
    from tui.screens.tables.models import group_lines, layer_lines, total_lines

    resolved = resolve_arguments(name_model(arguments or []), flags, trust_code=trust_code)
    print_no_effect(resolved)
    config = resolved.config
    from engine.train.models.catalog import resolve_model_source

    resolve_model_source(config.model)
    code_trust(resolved, granted=trust_code).check(config, ("model.name", "data.dataset"))
    # Imports torch, so only after the checks that need none.
    from engine.train.models.summary import summarize_model, without_dataset

    if resolved.sources["data.dataset"] == "default":
        config = without_dataset(config)
    result = summarize_model(config, images)
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    for line in (*layer_lines(result, depth), "", *total_lines(result), *group_lines(result)):
        typer.echo(line)


def name_model(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `model.name=MODEL` for a word that is a model and no config.

    Raises UsageError if there is more than one CONFIG, or for the name of a model that is not quite right.
    """
    from engine.config.loader import find_config
    from engine.train.models.catalog import MODEL_SOURCES, model_names

    word, overrides = split_arguments(list(arguments))
    if word is None:
        return overrides
    with suppress(UsageError):
        find_config(word)
        return [word, *overrides]
    # User code.
    if ":" in word:
        return [f"model.name={word}", *overrides]
    names = list[str]()
    for source in MODEL_SOURCES:
        # A library that is missing or broken has no models.
        with suppress(UsageError):
            names += model_names(source)
    if word in names:
        return [f"model.name={word}", *overrides]
    if hint := did_you_mean(word, names):
        raise UsageError.one(word, f"there is no such model, file or preset{hint}", code="not-found")
    return [word, *overrides]


def find_models(source: str | None) -> list[CatalogModel]:
    """Return the models of one source, or of all sources that work, and print why the others do not.

    Raises UsageError if `source` is missing or broken.
    """
    from engine.train.models.catalog import MODEL_SOURCES, builtin_models, read_listing

    if source is not None:
        return builtin_models() if source == "builtin" else list(read_listing(source).models)
    models = builtin_models()
    for name in MODEL_SOURCES[1:]:
        try:
            models += read_listing(name).models
        except UsageError as error:
            announce_problem(error.problems[0])
    return models


def announce_problem(problem: Problem) -> None:
    """Print why the models of a library cannot be used."""
    typer.echo(printable(problem.message), err=True)
