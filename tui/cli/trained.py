"""Commands that use a trained model: predict and evaluate."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.arguments import (
    JsonOption,
    RunArgument,
    RunsDirOption,
    TrustCodeOption,
    TrustOwnerOption,
    exit_on_usage_error,
    print_error,
    print_warning,
    trust_option,
)
from tui.cli.help import RESULTS, HelpCommand, make_epilog

if TYPE_CHECKING:
    from engine.inference.evaluate import CheckpointEvaluation
    from engine.inference.predict import Prediction
    from engine.inference.trained_model import TrainedCheckpoint
    from engine.runs.folder import RunFolder

app = typer.Typer()

CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", metavar="CHECKPOINT", help="Checkpoint to load: best, last, or a file.")
]
DeviceOption = Annotated[
    str,
    typer.Option("--device", metavar="DEVICE", help="auto (a free GPU, else the CPU), cpu, cuda or cuda:N."),
]
RawOption = Annotated[bool, typer.Option("--raw", help="Use the raw weights instead of the EMA weights.")]

# A larger confusion matrix does not fit a terminal.
MAX_MATRIX_CLASSES = 20


@app.command(
    cls=HelpCommand,
    rich_help_panel=RESULTS,
    epilog=make_epilog(
        ["gputrain predict last photo.jpg --top 3", "gputrain predict fashion-17 album/ --json"],
        exit_codes={0: "success", 1: "a named file cannot be read, or no image can", 2: "usage error"},
    ),
)
def predict(
    run: RunArgument,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE...", help="Image files or folders, searched recursively.")
    ],
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Number of classes to print per image.")] = 5,
    checkpoint: CheckpointOption = "best",
    device: DeviceOption = "auto",
    raw: RawOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Classify images with a trained model.

    Prints the most probable classes of each image with their probabilities. Images are preprocessed like the validation
    images of the run. Files in folders that are not images are skipped with a message; --json lists them in `skipped`.
    """
    from engine.inference.device import reserve_device
    from engine.inference.predict import find_input_files
    from engine.inference.predict import predict as predict_images
    from engine.inference.trained_model import check_takes_images, load_trained_model
    from engine.runs.find import find_run
    from engine.runs.folder import runs_root
    from engine.utils.files import expand_user
    from tui.tables.predictions import prediction_line, prediction_table

    failed: list[Prediction] = []
    with ExitStack() as reservation:
        with exit_on_usage_error():
            folder = find_run(runs_root(runs_dir), run, trust_owner=trust_owner)
            files = list(find_input_files([expand_user(image) for image in images]))
            reserved = reservation.enter_context(reserve_device(device, folder.name, print_warning))
            trust = trust_option(granted=trust_code)
            trained = load_trained_model(folder, checkpoint, device=reserved, raw=raw, code_trust=trust)
            check_takes_images(trained.checkpoint)
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
    raise typer.Exit(1 if named_failed or len(failed) == len(files) else 0)


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
    from engine.utils.codec import finite

    header = json.dumps({"format": 1, "run": run.name, "checkpoint": str(checkpoint.path)})
    typer.echo(f'{header[:-1]}, "images": [', nl=False)
    separator = "\n"
    for prediction in predictions:
        classes = [
            # A model with non-finite weights outputs NaN.
            {"name": name, "probability": finite(probability)}
            for name, probability in prediction.classes
        ]
        typer.echo(separator + json.dumps({"path": str(prediction.file.path), "classes": classes}), nl=False)
        separator = ",\n"
    skipped = [
        json.dumps({"path": str(file.file.path), "reason": error.message, "code": error.code})
        for file in failed
        if (error := file.error) is not None
    ]
    lines = ",".join(f"\n{line}" for line in skipped)
    typer.echo(f'\n], "skipped": [{lines}\n]}}')


@app.command(
    cls=HelpCommand,
    rich_help_panel=RESULTS,
    epilog=make_epilog(["gputrain evaluate last", "gputrain evaluate last data.path=~/other-photos --part all"]),
)
def evaluate(
    run: RunArgument,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Other data, such as data.path=~/photos, or eval.tta=flip."),
    ] = None,
    part: Annotated[str, typer.Option("--part", metavar="PART", help="Images to evaluate: val, train or all.")] = "val",
    checkpoint: CheckpointOption = "best",
    device: DeviceOption = "auto",
    raw: RawOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Evaluate a trained model on its validation set.

    Prints the loss, top-1 and top-5 accuracy, the accuracy of each class and the confusion matrix. data.KEY=VALUE
    evaluates on other data, whose classes are matched by name; eval.tta=flip averages the logits of each image and its
    mirror image. Every image is evaluated once, in float32.
    """
    from engine.inference.device import reserve_device
    from engine.inference.evaluate import evaluate_checkpoint
    from engine.inference.trained_model import read_trained_checkpoint
    from engine.runs.find import find_run
    from engine.runs.folder import runs_root
    from engine.utils.errors import UsageError

    with exit_on_usage_error():
        if part not in ("val", "train", "all"):
            raise UsageError.one(
                "--part", f"{part} is not allowed: must be one of val, train, all", code="unknown-value"
            )
        folder = find_run(runs_root(runs_dir), run, trust_owner=trust_owner)
        trust = trust_option(granted=trust_code)
        trained = read_trained_checkpoint(folder, checkpoint, raw=raw, code_trust=trust)
        with reserve_device(device, folder.name, print_warning) as reserved:
            result = evaluate_checkpoint(trained, changes or [], part, reserved)  # type: ignore[arg-type]
    if result.unread:
        from engine.utils.text import pluralize, printable

        for file in result.unread:
            typer.echo(f"skipped: {printable(file)}", err=True)
        typer.echo(f"{pluralize(len(result.unread), 'image')} could not be read", err=True)
    if as_json:
        typer.echo(json.dumps(evaluation_json(result, trained, folder, part), indent=2))
    else:
        typer.echo("\n".join(evaluation_lines(result, trained, part)))


def evaluation_json(
    result: CheckpointEvaluation, checkpoint: TrainedCheckpoint, run: RunFolder, part: str
) -> dict[str, Any]:
    """Return the output of `gputrain evaluate --json`."""
    evaluation, data = result.evaluation, result.config.data
    return {
        "format": 1,
        "run": run.name,
        "checkpoint": str(checkpoint.path),
        "dataset": data.dataset,
        "path": data.path,
        "part": part,
        "tta": result.config.eval.tta,
        "input": {key: getattr(data, key) for key in ("val_resize", "val_crop", "fit", "interpolation")},
        "images": evaluation.metrics.images,
        "unread": len(result.unread),
        "loss": evaluation.metrics.loss if math.isfinite(evaluation.metrics.loss) else None,
        "top1": evaluation.metrics.accuracy,
        "top5": evaluation.top5,
        "classes": [
            {"name": name, "images": images, "accuracy": accuracy}
            for name, images, accuracy in zip(
                checkpoint.classes, result.images_per_class, evaluation.per_class, strict=True
            )
        ],
        "confusion": evaluation.confusion,
        "metrics": {name: value if math.isfinite(value) else None for name, value in evaluation.own.items()},
    }


def evaluation_lines(result: CheckpointEvaluation, checkpoint: TrainedCheckpoint, part: str) -> list[str]:
    """Return the report of `gputrain evaluate`: totals, accuracy per class, confusion matrix."""
    from engine.inference.evaluate import evaluation_format
    from engine.show.table import plain_lines
    from engine.utils.text import printable
    from engine.utils.units import format_count, format_score
    from tui.tables.confusion import CLASS_COLUMNS, ClassRow, matrix_lines

    evaluation, metrics, data = result.evaluation, result.evaluation.metrics, result.config.data
    path = data.val_path if part == "val" and data.val_path is not None else data.path
    source = data.dataset if path is None else f"{data.dataset} in {path}"
    tta = "" if result.config.eval.tta == "none" else f", eval.tta={result.config.eval.tta}"
    image_format = evaluation_format(checkpoint, result.config)
    changed = "" if image_format == checkpoint.image_format else f", images: {image_format.describe_evaluation()}"
    images_of = "all parts" if part == "all" else f"part {part}"
    own = [f"{name} {format_score(value)}" for name, value in evaluation.own.items()]
    rows = [
        ClassRow(name, math.nan if accuracy is None else accuracy, images)
        for name, images, accuracy in zip(
            checkpoint.classes, result.images_per_class, evaluation.per_class, strict=True
        )
    ]
    lines = [
        f"{checkpoint.path.name} on {printable(source)}, {images_of}{tta}{changed}",
        f"{format_count(metrics.images)} images  loss {format_score(metrics.loss)}  "
        f"top-1 {format_score(metrics.accuracy)}  top-5 {format_score(evaluation.top5)}",
        *(["  ".join(own)] if own else []),
        "",
        *plain_lines(CLASS_COLUMNS, rows),
    ]
    if len(checkpoint.classes) <= MAX_MATRIX_CLASSES:
        lines += ["", "confusion matrix (rows: true class, columns: predicted class)"]
        lines += matrix_lines([printable(name) for name in checkpoint.classes], evaluation.confusion)
    return lines
