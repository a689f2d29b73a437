"""`gputrain predict`: the classes, labels or numbers of images."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.base.codec import encode
from engine.base.errors import Problem, UsageError, file_errors
from engine.base.files import expand_user, replace_file
from engine.base.output_file import check_output
from engine.base.text import pluralize, printable
from engine.base.units import format_score
from engine.config.tasks import task_facts
from engine.report.table import NO_LIMIT, Column, FittedTable, cell_width, fit, line_text
from engine.runs.folder import RunFolder
from tui.cli.command import command, takes
from tui.cli.console import json_line, print_error, print_warning
from tui.cli.options import ForceOption, JsonOption, output_option
from tui.cli.run_options import ModelOptions, reads_run

if TYPE_CHECKING:
    from engine.train.inference.predict import InputFile, Prediction
    from engine.train.inference.trained_model import TrainedCheckpoint, TrainedModel


TABLE_SUFFIXES = (".csv", ".json")


@command(
    [
        "gputrain predict last photo.jpg --top 3",
        "gputrain predict fashion-17 album/ -o classes.csv",
    ],
    exit_codes={0: "success", 1: "a named file cannot be read, or no image can", 2: "usage error"},
)
@takes("model", ModelOptions)
@reads_run
def predict(
    *,
    folder: RunFolder,
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Image files or folders, searched recursively.")
    ],
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Classes to print per image.")] = 5,
    output: Annotated[str | None, output_option("FILE.csv or .json.")] = None,
    force: ForceOption = False,
    model: ModelOptions,
    as_json: JsonOption = False,
) -> None:
    """Predict classes, labels or numbers of images.

    Prints the most probable classes of each image with their probabilities; with task multilabel the labels that reach
    their thresholds, with regression the numbers. Images are preprocessed like the validation images of the run. With
    -o FILE.csv, each image is a line: path, class, probability, and the same of the next classes, or a column for each
    label or number; FILE.json is what --json prints.

    Files in folders that are not images are skipped with a message; JSON lists them in `skipped`.
    """
    from engine.train.inference.device import reserve_device
    from engine.train.inference.predict import find_input_files
    from engine.train.inference.trained_model import load_trained_model

    without_effect = {
        "--force": (force and output is None, "without --output"),
        "--json": (as_json and output is not None, "with --output, whose ending names the format"),
    }
    if option := next((name for name, (is_useless, _) in without_effect.items() if is_useless), None):
        raise UsageError.one(option, f"has no effect {without_effect[option][1]}", code="no-effect")
    target = table_target(output, force=force)
    files = list(find_input_files([expand_user(path) for path in paths]))
    with reserve_device(model.gpus, folder.name, print_warning) as reserved:
        trained = load_trained_model(
            folder, model.checkpoint, device=reserved, raw=not model.ema, code_trust=model.trust
        )
        raise typer.Exit(classify(folder, trained, files, top, target, as_json=as_json))


def table_target(output: str | None, *, force: bool) -> Path | None:
    """Return the file to which the classes of images are written; None without one. Raises UsageError."""
    if output is None:
        return None
    target = expand_user(output)
    if target.suffix.casefold() not in TABLE_SUFFIXES:
        reason = f"{output} must end in {' or '.join(TABLE_SUFFIXES)}"
        raise UsageError.one("--output", reason, code="wrong-format")
    check_output(target, "classes.csv", force=force)
    return target


def classify(
    folder: RunFolder,
    trained: TrainedModel,
    files: Sequence[InputFile],
    top: int,
    target: Path | None,
    *,
    as_json: bool,
) -> int:
    """Print the classes of each file, or write them to `target`, and return the exit code.

    Raises UsageError for a model that takes no images."""
    from engine.train.inference.predict import predict as predict_images
    from engine.train.inference.trained_model import check_takes_images

    check_takes_images(trained.checkpoint)
    failed: list[Prediction] = []
    predictions = skip_unreadable(predict_images(trained, files, top), failed)
    if as_json or (target is not None and target.suffix.casefold() == ".json"):
        texts = json_texts(predictions, failed, folder, trained.checkpoint)
    elif target is not None:
        texts = csv_texts(predictions, trained.checkpoint, top)
    else:
        texts = table_texts(predictions, files, trained.checkpoint)
    if target is None:
        for text in texts:
            typer.echo(text, nl=False)
    else:
        write_texts(target, texts)
        typer.echo(printable(f"{target}: {pluralize(len(files) - len(failed), 'image')}"))
    named_failed = any(prediction.file.explicit for prediction in failed)
    if len(failed) == len(files) and not named_failed:
        content = "no readable image" if files else "no files"
        print_error(Problem("", f"the folders contain {content}", code="no-images"))
    return int(named_failed or len(failed) == len(files))


def write_texts(target: Path, texts: Iterable[str]) -> None:
    """Replace a file by texts. Raises UsageError if it cannot be written."""
    with file_errors(str(target), "cannot be written", code="not-writable"):
        # Names of files may have bytes that are no text.
        replace_file(target, lambda file: file.writelines(text.encode(errors="surrogateescape") for text in texts))


def skip_unreadable(predictions: Iterator[Prediction], failed: list[Prediction]) -> Iterator[Prediction]:
    """Yield the predictions of readable images; report the others on stderr and append them to `failed`."""
    for prediction in predictions:
        if prediction.error is None:
            yield prediction
            continue
        failed.append(prediction)
        prefix = "error" if prediction.file.explicit else "skipped"
        typer.echo(f"{prefix}: {printable(f'{prediction.file.path} {prediction.error}')}", err=True)


def table_texts(
    predictions: Iterator[Prediction], files: Sequence[InputFile], checkpoint: TrainedCheckpoint
) -> Iterator[str]:
    """Yield a line for each prediction."""
    classes = checkpoint.classes if task_facts(checkpoint.config).ranked else None
    table = prediction_table([str(file.path) for file in files], classes)
    for prediction in predictions:
        yield f"{prediction_line(table, prediction)}\n"


def csv_texts(predictions: Iterator[Prediction], checkpoint: TrainedCheckpoint, top: int) -> Iterator[str]:
    """Yield a line of names, and a line for each prediction, with its `top` classes or a column for each output."""

    def line(cells: Sequence[object]) -> str:
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        return text.getvalue()

    facts, names = task_facts(checkpoint.config), checkpoint.classes
    more = (f"{name}_{number}" for number in range(2, min(top, len(names)) + 1) for name in ("class", "probability"))
    yield line(["path", *(["class", "probability", *more] if facts.ranked else names)])
    for prediction in predictions:
        if facts.ranked:
            cells: list[object] = [cell for pair in prediction.classes for cell in pair]
        else:
            values = dict(prediction.classes)
            cells = [values.get(name, "") for name in names]
        yield line([prediction.file.path, *cells])


def json_texts(
    predictions: Iterator[Prediction], failed: Sequence[Prediction], run: RunFolder, checkpoint: TrainedCheckpoint
) -> Iterator[str]:
    """Yield the parts of one JSON object. Its array `images` has a line for each prediction, as they arrive.

    `failed` has the files that could not be read once all predictions have arrived.
    """
    facts = task_facts(checkpoint.config)
    header = json_line({"run": run.name, "checkpoint": str(checkpoint.path)})
    yield f'{header[:-1]}, "images": ['
    separator = "\n"
    for prediction in predictions:
        named = [{"name": name, facts.value: value} for name, value in prediction.classes]
        yield separator + encode({"path": str(prediction.file.path), facts.outputs: named}).decode()
        separator = ",\n"
    skipped = [
        encode({"path": str(file.file.path), "reason": error.message, "code": error.code}).decode()
        for file in failed
        if (error := file.error) is not None
    ]
    lines = ",".join(f"\n{line}" for line in skipped)
    yield f'\n], "skipped": [{lines}\n]}}\n'


def prediction_table(paths: Iterable[str], classes: Sequence[str] | None) -> FittedTable[Prediction]:
    """Return the table for images of these paths, which are not shortened. Without classes, it shows all values.

    The lines are printed one by one as the predictions arrive, so no prediction is measured.
    """
    columns: tuple[Column[Prediction], ...] = (
        Column("image", "", lambda row: str(row.file.path), width=_longest(paths)),
        Column("values", "", lambda row: values_text(row.classes) or "(none)"),
    )
    if classes is None:
        return fit(columns, [], NO_LIMIT)
    columns = (
        columns[0],
        Column("class", "", lambda row: row.classes[0][0], width=_longest(classes)),
        Column("probability", "", lambda row: format_score(row.classes[0][1]), width=len("0.1234")),
        Column("others", "", lambda row: values_text(row.classes[1:])),
    )
    return fit(columns, [], NO_LIMIT)


def prediction_line(table: FittedTable[Prediction], prediction: Prediction) -> str:
    """Return the line of an image."""
    last = table.columns[-1]
    return line_text(table.line(prediction, rest=(last.key, last.cell(prediction))))


def values_text(values: Iterable[tuple[str, float]]) -> str:
    """Return names with their values."""
    return ", ".join(f"{name} {format_score(value)}" for name, value in values)


def _longest(texts: Iterable[str]) -> int:
    return max((cell_width(printable(text)) for text in texts), default=0)
