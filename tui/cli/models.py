"""`gputrain models` and `gputrain summary`: which models there are, and what one of them is made of."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from tui.cli.arguments import (
    ConfigArguments,
    ConfigCommand,
    JsonOption,
    exit_on_usage_error,
    flag_overrides,
    resolve_arguments,
)

app = typer.Typer()

MODELS_FORMAT = 1
SUMMARY_FORMAT = 1
SourceName = Literal["builtin", "torchvision", "timm"]


@app.command(epilog="Example: gputrain models 'resnet*' --pretrained")
def models(
    wanted: Annotated[
        str | None, typer.Argument(metavar="[FILTER]", help="A part of the name, or a pattern such as 'vit_*_224'.")
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Only those with pretrained weights.")] = False,
    source: Annotated[SourceName | None, typer.Option("--source", help="Only those of one source.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the models by name: their parameters, their pretrained weights, and the top-1 accuracy of these on ImageNet
    where the library tells it.

    Parameters are those of the model as its library makes it: for 1000 classes mostly, the built-in ones for ten
    classes of 3 x 32 x 32 images. They are counted once for each installed version.
    """
    from engine.models.catalog import filter_models, with_parameter_counts
    from tui.text.models import announce_parameter_count, list_models, no_match_message, print_models

    with exit_on_usage_error():
        known = list_models(source)
        found = [model for model in filter_models(known, wanted) if model.weights or not pretrained]
    if not found:
        typer.echo(no_match_message(known, wanted, pretrained=pretrained), err=True)
        raise typer.Exit(1)
    counted = with_parameter_counts(found, announce_parameter_count)
    if as_json:
        listed = [model.to_dict() for model in counted]
        typer.echo(json.dumps({"format": MODELS_FORMAT, "models": listed}, indent=2))
    else:
        print_models(found, counted)


@app.command(
    cls=ConfigCommand, epilog="Example: gputrain summary --model resnet50 data.image_size=224 data.num_classes=1000"
)
def summary(
    arguments: ConfigArguments = None,
    model: Annotated[str | None, typer.Option("--model")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset")] = None,
    data_path: Annotated[str | None, typer.Option("--data-path")] = None,
    images: Annotated[int, typer.Option("--batch-size", min=1, help="Images that go through it at once.")] = 1,
    depth: Annotated[
        int, typer.Option("--depth", min=0, help="Levels that are shown; what is deeper counts for what it is in.")
    ] = 3,
    features: Annotated[
        bool, typer.Option("--features", help="The feature maps instead: the last of each resolution.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the layers of a model for the images of its data: output shape, parameters, multiply-adds.

    Each row counts what is within it. Multiply-adds are those of convolutions, matrix products and attention, for the
    whole batch; torch counts two operations for each. Nothing is trained, and no weights are loaded.
    """
    from tui.text.model_summary import feature_lines, layer_lines, total_lines

    given = {"model": model, "dataset": dataset, "data_path": data_path}
    with exit_on_usage_error():
        config = resolve_arguments(arguments, flag_overrides(given)).config
        from engine.models.catalog import check_model_name

        check_model_name(config.model)
        # What torch alone can tell.
        from engine.models.summary import summarize_model

        found = summarize_model(config, images)
    if as_json:
        typer.echo(json.dumps({"format": SUMMARY_FORMAT, **found.to_dict()}, indent=2))
        return
    for line in feature_lines(found) if features else [*layer_lines(found, depth), "", *total_lines(found)]:
        typer.echo(line)
