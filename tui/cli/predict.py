"""`gputrain predict`: the classes of images, or the features that a trained model computes for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tui.cli.command import command
from tui.cli.console import print_error, print_warning
from tui.cli.options import ForceOption, JsonOption, output_option
from tui.cli.run_options import ModelOptions, reads_run, takes_model

if TYPE_CHECKING:
    from pathlib import Path

    from engine.inference.features import ExtractedFeatures
    from engine.inference.predict import InputFile, Prediction
    from engine.inference.trained_model import TrainedCheckpoint, TrainedModel
    from engine.runs.folder import RunFolder
    from engine.utils.errors import Problem

DEFAULT_TOP = 5


@command(
    [
        "gputrain predict last photo.jpg --top 3",
        "gputrain predict fashion-17 album/ --json",
        "gputrain predict last photos/ --features auto -o features.npz",
        "gputrain predict last photos/ --features layer3 --no-pool -o maps.npz",
    ],
    exit_codes={0: "success", 1: "a named file cannot be read, or no image can", 2: "usage error"},
)
@takes_model
@reads_run
def predict(
    *,
    folder: RunFolder,
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Image files or folders, searched recursively.")
    ],
    top: Annotated[
        int | None,
        typer.Option("--top", metavar="N", min=1, help=f"Classes to print per image [default: {DEFAULT_TOP}]"),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            "--features",
            metavar="LAYER",
            help="Layer whose output is written instead, or auto.",
        ),
    ] = None,
    output: Annotated[str | None, output_option("features, for numpy.load.")] = None,
    no_pool: Annotated[
        bool, typer.Option("--no-pool", help="Write whole feature maps, not their mean over pixels.")
    ] = False,
    force: ForceOption = False,
    model: ModelOptions,
    as_json: JsonOption = False,
) -> None:
    """Classify images with a trained model, or extract their features.

    Prints the most probable classes of each image with their probabilities. Images are preprocessed like the validation
    images of the run.

    Files in folders that are not images are skipped with a message; --json lists them in `skipped`.

    --features writes the output of a layer for each image of one folder to a file for numpy.load: features (float32),
    paths, labels (index into classes, -1 without a class folder), classes and layer. `gputrain models show --stages`
    lists the layers.
    """
    from engine.inference.device import reserve_device
    from engine.inference.predict import find_input_files
    from engine.inference.trained_model import load_trained_model
    from engine.utils.files import expand_user

    check_options(layer, {"--top": top is not None}, {"--output": output, "--no-pool": no_pool, "--force": force})
    inputs = [expand_user(path) for path in paths]
    target = None if layer is None else features_target(paths, output, force=force)
    files = list(find_input_files(inputs))
    with reserve_device(model.gpus, folder.name, print_warning) as reserved:
        trained = load_trained_model(folder, model.checkpoint, device=reserved, raw=model.raw, code_trust=model.trust)
        if target is None:
            raise typer.Exit(classify(folder, trained, files, top or DEFAULT_TOP, as_json=as_json))
        from engine.inference.features import extract_features

        chosen = None if layer == "auto" else layer
        extracted = extract_features(
            trained, inputs[0], files, target.absolute(), layer=chosen, pool=not no_pool, report=print_skipped
        )
    print_features(folder, trained.checkpoint, target, extracted, as_json=as_json)


def check_options(layer: str | None, of_classes: dict[str, object], of_features: dict[str, object]) -> None:
    """Raise UsageError for an option, by its name, that has a value and no effect."""
    from engine.utils.errors import UsageError

    others, why = (of_features, "without --features LAYER") if layer is None else (of_classes, "with --features")
    if option := next((name for name, value in others.items() if value), None):
        raise UsageError.one(option, f"has no effect {why}", code="no-effect")


def features_target(paths: Sequence[str], output: str | None, *, force: bool) -> Path:
    """Return the file to which the features of a folder are written. Raises UsageError."""
    from engine.utils.errors import UsageError
    from engine.utils.files import expand_user, is_folder
    from engine.utils.output_file import check_output

    if len(paths) > 1 or not is_folder(expand_user(paths[0])):
        reason = f"{paths[-1]} is not a folder" if len(paths) == 1 else f"names {len(paths)} paths"
        raise UsageError.one("PATH", reason, "name one folder of images for --features", code="not-a-folder")
    if output is None:
        advice = "name the file to write: -o features.npz"
        raise UsageError.one("--output", "is missing", advice, code="missing-value")
    target = expand_user(output)
    check_output(target, "features.npz", force=force)
    return target


def classify(folder: RunFolder, trained: TrainedModel, files: Sequence[InputFile], top: int, *, as_json: bool) -> int:
    """Print the classes of each file and return the exit code. Raises UsageError for a model that takes no images."""
    from engine.inference.predict import predict as predict_images
    from engine.inference.trained_model import check_takes_images
    from tui.tables.predictions import prediction_line, prediction_table

    check_takes_images(trained.checkpoint)
    failed: list[Prediction] = []
    predictions = skip_unreadable(predict_images(trained, files, top), failed)
    if as_json:
        print_predictions_json(predictions, failed, folder, trained.checkpoint)
    else:
        table = prediction_table([str(file.path) for file in files], trained.checkpoint.classes)
        for prediction in predictions:
            typer.echo(prediction_line(table, prediction))
    named_failed = any(prediction.file.explicit for prediction in failed)
    if len(failed) == len(files) and not named_failed:
        from engine.utils.errors import Problem

        content = "no readable image" if files else "no files"
        print_error(Problem("", f"the folders contain {content}", code="no-images"))
    return int(named_failed or len(failed) == len(files))


def skip_unreadable(predictions: Iterator[Prediction], failed: list[Prediction]) -> Iterator[Prediction]:
    """Yield the predictions of readable images; report the others on stderr and append them to `failed`."""
    from engine.utils.text import printable

    for prediction in predictions:
        if prediction.error is None:
            yield prediction
            continue
        failed.append(prediction)
        prefix = "error" if prediction.file.explicit else "skipped"
        typer.echo(f"{prefix}: {printable(f'{prediction.file.path} {prediction.error}')}", err=True)


def print_predictions_json(
    predictions: Iterator[Prediction], failed: Sequence[Prediction], run: RunFolder, checkpoint: TrainedCheckpoint
) -> None:
    """Print one JSON object. Its array `images` is written line by line, as the predictions arrive.

    `failed` has the files that could not be read once all predictions have arrived.
    """
    from engine.utils.codec import encode
    from tui.cli.outputs import json_line

    header = json_line({"run": run.name, "checkpoint": str(checkpoint.path)})
    typer.echo(f'{header[:-1]}, "images": [', nl=False)
    separator = "\n"
    for prediction in predictions:
        classes = [{"name": name, "probability": probability} for name, probability in prediction.classes]
        image = encode({"path": str(prediction.file.path), "classes": classes}).decode()
        typer.echo(separator + image, nl=False)
        separator = ",\n"
    skipped = [
        encode({"path": str(file.file.path), "reason": error.message, "code": error.code}).decode()
        for file in failed
        if (error := file.error) is not None
    ]
    lines = ",".join(f"\n{line}" for line in skipped)
    typer.echo(f'\n], "skipped": [{lines}\n]}}')


def print_skipped(file: InputFile, error: Problem) -> None:
    """Name a file that is no readable image on stderr."""
    from engine.utils.text import printable

    typer.echo(f"skipped: {printable(f'{file.path} {error}')}", err=True)


def print_features(
    run: RunFolder, checkpoint: TrainedCheckpoint, target: Path, result: ExtractedFeatures, *, as_json: bool
) -> None:
    """Print what was written."""
    from engine.utils.files import shown_path
    from engine.utils.text import pluralize, printable

    if as_json:
        from tui.cli.model_outputs import FeaturesOutput
        from tui.cli.outputs import print_json

        print_json(
            FeaturesOutput(
                run=run.name,
                checkpoint=str(checkpoint.path),
                file=str(target),
                layer=result.layer,
                shape=list(result.shape),
                classes=list(result.classes),
                unread=result.unread,
            )
        )
        return
    shape = "x".join(map(str, result.shape[1:])) or "1"
    labels = f", {pluralize(len(result.classes), 'class folder')}" if result.classes else ""
    rows = f"{pluralize(result.shape[0], 'image')}, {shape} features each of layer {result.layer}{labels}"
    typer.echo(printable(f"{shown_path(target)}: {rows}"))
