"""`gputrain predict`: the classes of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tui.cli.command import command
from tui.cli.console import json_line, print_error, print_warning
from tui.cli.options import JsonOption
from tui.cli.run_options import ModelOptions, reads_run, takes_model

if TYPE_CHECKING:
    from engine.inference.predict import InputFile, Prediction
    from engine.inference.trained_model import TrainedCheckpoint, TrainedModel
    from engine.runs.folder import RunFolder


@command(
    [
        "gputrain predict last photo.jpg --top 3",
        "gputrain predict fashion-17 album/ --json > classes.json",
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
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Classes to print per image.")] = 5,
    model: ModelOptions,
    as_json: JsonOption = False,
) -> None:
    """Classify images with a trained model.

    Prints the most probable classes of each image with their probabilities. Images are preprocessed like the validation
    images of the run.

    Files in folders that are not images are skipped with a message; JSON lists them in `skipped`.
    """
    from engine.inference.device import reserve_device
    from engine.inference.predict import find_input_files
    from engine.inference.trained_model import load_trained_model
    from engine.utils.files import expand_user

    files = list(find_input_files([expand_user(path) for path in paths]))
    with reserve_device(model.gpus, folder.name, print_warning) as reserved:
        trained = load_trained_model(folder, model.checkpoint, device=reserved, raw=model.raw, code_trust=model.trust)
        raise typer.Exit(classify(folder, trained, files, top, as_json=as_json))


def classify(
    folder: RunFolder,
    trained: TrainedModel,
    files: Sequence[InputFile],
    top: int,
    *,
    as_json: bool,
) -> int:
    """Print the classes of each file, and return the exit code.

    Raises UsageError for a model that takes no images."""
    from engine.inference.predict import predict as predict_images
    from engine.inference.trained_model import check_takes_images

    check_takes_images(trained.checkpoint)
    failed: list[Prediction] = []
    predictions = skip_unreadable(predict_images(trained, files, top), failed)
    if as_json:
        texts = json_texts(predictions, failed, folder, trained.checkpoint)
    else:
        texts = table_texts(predictions, files, trained.checkpoint.classes)
    for text in texts:
        typer.echo(text, nl=False)
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


def table_texts(predictions: Iterator[Prediction], files: Sequence[InputFile], classes: Sequence[str]) -> Iterator[str]:
    """Yield a line for each prediction."""
    from tui.tables.predictions import prediction_line, prediction_table

    table = prediction_table([str(file.path) for file in files], classes)
    for prediction in predictions:
        yield f"{prediction_line(table, prediction)}\n"


def json_texts(
    predictions: Iterator[Prediction], failed: Sequence[Prediction], run: RunFolder, checkpoint: TrainedCheckpoint
) -> Iterator[str]:
    """Yield the parts of one JSON object. Its array `images` has a line for each prediction, as they arrive.

    `failed` has the files that could not be read once all predictions have arrived.
    """
    from engine.utils.codec import encode

    header = json_line({"run": run.name, "checkpoint": str(checkpoint.path)})
    yield f'{header[:-1]}, "images": ['
    separator = "\n"
    for prediction in predictions:
        classes = [{"name": name, "probability": probability} for name, probability in prediction.classes]
        yield separator + encode({"path": str(prediction.file.path), "classes": classes}).decode()
        separator = ",\n"
    skipped = [
        encode({"path": str(file.file.path), "reason": error.message, "code": error.code}).decode()
        for file in failed
        if (error := file.error) is not None
    ]
    lines = ",".join(f"\n{line}" for line in skipped)
    yield f'\n], "skipped": [{lines}\n]}}\n'
