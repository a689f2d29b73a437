"""`gputrain models` lists the available models; `gputrain summary` prints the layers of one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tui.cli.arguments import (
    ConfigArguments,
    JsonOption,
    TrustCodeOption,
    code_trust,
    exit_on_usage_error,
    flag_overrides,
    print_no_effect,
    resolve_arguments,
)
from tui.cli.help import TRAIN, ConfigCommand, HelpCommand, make_epilog

if TYPE_CHECKING:
    from engine.models.catalog import CatalogModel
    from engine.utils.errors import Problem

app = typer.Typer()

MODELS_FORMAT = 1
SUMMARY_FORMAT = 1
# Counting this many models takes about a second and needs no message.
MAX_SILENT_COUNT = 10
MAX_SUGGESTIONS = 5
SourceName = Literal["builtin", "torchvision", "timm"]


@app.command(
    cls=HelpCommand,
    rich_help_panel=TRAIN,
    epilog=make_epilog(["gputrain models resnet", "gputrain models 'vit_*_224' --source timm --pretrained"]),
)
def models(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[FILTER]", help="Part of the name, or a pattern such as 'vit_*_224'.")
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="List only models with pretrained weights.")] = False,
    source: Annotated[SourceName | None, typer.Option("--source", help="List only models of this source.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the available models.

    Prints parameters, pretrained weights and their ImageNet top-1 accuracy if the library publishes it.

    Parameters are counted with the default number of classes of the library, mostly 1000. Built-in models are counted
    with 10 classes of 3x32x32 images. Counts are cached for each installed version.
    """
    from engine.models.catalog import filter_models, with_parameter_counts
    from engine.utils.codec import asdict

    with exit_on_usage_error():
        available = list_models(source)
        matches = [model for model in filter_models(available, pattern) if model.weights or not pretrained]
    if not matches:
        typer.echo(no_match_message(available, pattern, pretrained=pretrained), err=True)
        raise typer.Exit(1)
    with_counts = with_parameter_counts(matches, announce_parameter_count, announce_problem)
    if as_json:
        rows = [asdict(model) for model in with_counts]
        typer.echo(json.dumps({"format": MODELS_FORMAT, "models": rows}, indent=2))
    else:
        print_models(matches, with_counts)


@app.command(
    cls=ConfigCommand,
    rich_help_panel=TRAIN,
    epilog=make_epilog(
        [
            "gputrain summary digits",
            "gputrain summary flowers.yaml --features",
            "gputrain summary --model resnet50",
        ]
    ),
)
def summary(
    arguments: ConfigArguments = None,
    model: Annotated[str | None, typer.Option("--model")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset")] = None,
    data_path: Annotated[str | None, typer.Option("--data-path")] = None,
    images: Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Images in the forward pass.")] = 1,
    depth: Annotated[
        int,
        typer.Option("--depth", metavar="N", min=0, help="Depth of the module tree to print."),
    ] = 3,
    features: Annotated[
        bool, typer.Option("--features", help="Print the last feature map of each resolution instead.")
    ] = False,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Print the layers of a model: shapes, parameters, multiply-adds.

    Image size, channels and classes come from the configured data; without a dataset, they are those of ImageNet: 224
    pixels, 3 channels and 1,000 classes. Each row includes its submodules. Multiply-adds cover convolutions, matrix
    products and attention of the whole batch; one multiply-add is two FLOPs. No weights are loaded.
    """
    from tui.tables.models import feature_lines, group_lines, layer_lines, total_lines

    flag_values = {"model": model, "dataset": dataset, "data_path": data_path}
    with exit_on_usage_error():
        resolved = resolve_arguments(arguments, flag_overrides(flag_values), trust_code=trust_code)
        print_no_effect(resolved)
        config = resolved.config
        from engine.models.catalog import check_model_name

        check_model_name(config.model)
        code_trust(resolved, granted=trust_code).check(config, ("model.name", "data.dataset"))
        # Imports torch, so only after the checks that need none.
        from engine.models.summary import summarize_model, without_dataset

        if resolved.sources["data.dataset"] == "default":
            config = without_dataset(config)
        result = summarize_model(config, images)
    if as_json:
        typer.echo(json.dumps({"format": SUMMARY_FORMAT, **dataclasses.asdict(result)}, indent=2))
        return
    layers = [*layer_lines(result, depth), "", *total_lines(result), *group_lines(result)]
    for line in feature_lines(result) if features else layers:
        typer.echo(line)


def list_models(source: str | None) -> list[CatalogModel]:
    """Return the models of one source, or of all sources that work, and print why the others do not.

    Raises UsageError if `source` is missing or broken.
    """
    from engine.models.catalog import MODEL_SOURCES, builtin_models, library_models
    from engine.utils.errors import UsageError

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
    from engine.utils.text import printable

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
    """Print the table; `counted_models` yields each of `models` as soon as its parameters are counted.

    Counting can take minutes, so each line is printed at once.
    """
    from engine.show.table import NO_LIMIT, fit, line_text
    from tui.tables.models import MODEL_COLUMNS

    table = fit(MODEL_COLUMNS, models, NO_LIMIT)
    typer.echo(line_text(table.header()))
    for model in counted_models:
        typer.echo(line_text(table.line(model)))


def no_match_message(available: Sequence[CatalogModel], pattern: str | None, *, pretrained: bool) -> str:
    """Return why no model matches, with the nearest names."""
    import difflib

    from engine.models.catalog import filter_models

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
