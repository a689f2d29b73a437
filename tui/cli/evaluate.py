"""`gputrain evaluate`: how good a trained model is, and the single images that it gets wrong or doubts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.base.codec import finite
from engine.base.errors import UsageError
from engine.base.libraries import check_training
from engine.base.text import pluralize, printable
from engine.config.tasks import task_facts
from engine.runs.checkpoint_files import find_checkpoint
from engine.runs.folder import RunFolder
from tui.cli.command import command, takes
from tui.cli.completions import complete_evaluation_keys
from tui.cli.config_arguments import FlagOverrides, config_flags
from tui.cli.console import print_json, print_warning
from tui.cli.options import JsonOption, Split, count_option, split_option
from tui.cli.run_options import ModelOptions, takes_run

if TYPE_CHECKING:
    from engine.runs.inspection import InspectedImage, Inspection
    from engine.train.inference.evaluate import CheckpointEvaluation
    from engine.train.inference.stored_inspection import InspectionRequest
    from engine.train.inference.trained_model import TrainedCheckpoint

DEFAULT_COUNT = 20
RESULTS = ("predicted", "true")
MEMORIZED = (
    "the model has trained on some of these images and may have learned their wrong labels; list images that it has "
    "not trained on (--split val), or use an early checkpoint (checkpoint.keep, --checkpoint FILE)"
)


class ListName(StrEnum):
    """The lists of single images. typer takes no list of Literals."""

    MISTAKES = "mistakes"
    UNCERTAIN = "uncertain"
    LABEL_ISSUES = "label-issues"


@command(
    [
        "gputrain evaluate last",
        "gputrain evaluate last --list mistakes",
        "gputrain evaluate last --list mistakes --list label-issues -n 40",
        "gputrain evaluate last --data-path ~/other-photos --split all",
    ],
    "Suspected wrong labels: confident learning (Northcutt et al. 2021). A model agrees with a wrong label that it "
    "has memorized, so a list of training images misses some. Every image is in the validation set of some "
    "run.seed: train a few runs with other seeds, and list the issues of each with --split val. Or use a checkpoint of "
    "an early epoch: models learn the right labels first (checkpoint.every_epochs=1, checkpoint.keep).",
)
@config_flags("dataset", "data_path", "image_size", "batch_size", "workers")
@takes("model", ModelOptions)
@takes_run
def evaluate(
    *,
    folder: RunFolder,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Other data, such as data.path=~/photos, or eval.tta=flip.",
            autocompletion=complete_evaluation_keys,
        ),
    ] = None,
    split: Annotated[Split, split_option("evaluate")] = "val",
    lists: Annotated[
        list[ListName] | None,
        typer.Option(
            "--list",
            metavar="<mistakes|uncertain|label-issues>",
            help="Images to list; repeat for more lists.",
        ),
    ] = None,
    count: Annotated[int | None, count_option(f"images of each list [default: {DEFAULT_COUNT}]")] = None,
    again: Annotated[bool, typer.Option("--again", help="Evaluate again, although nothing has changed.")] = False,
    model: ModelOptions,
    flags: FlagOverrides,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a trained model on its validation set.

    Prints loss, top-1 and top-5 accuracy, the accuracy of each class and the confusion matrix, or the metrics of the
    task; with --list, single images instead: the most confident mistakes, the most uncertain images, or those with
    suspicious labels. The mistakes of labels and numbers are the images with the greatest losses.

    Other data has its classes matched by name. Every image is evaluated once, in float32. A list is kept in the folder
    of the run, for the screen and the report, and used again while checkpoint and data are the same.
    """
    from engine.runs.inspection import LIST_NAMES
    from engine.train.inference.stored_inspection import InspectionRequest, checkpoint_digest, find_stored

    names = [name.value for name in lists or []]
    overrides = evaluation_overrides(changes or [], flags)
    if not names:
        option = "--count" if count is not None else "--again" if again else None
        if option is not None:
            raise UsageError.one(option, "has no effect without --list", code="no-effect")
        print_evaluation(folder, model, overrides, split, as_json=as_json)
        return
    digest = checkpoint_digest(find_checkpoint(folder, model.checkpoint))
    request = InspectionRequest(digest, not model.ema, tuple(overrides), split)
    inspection = None if again else find_stored(folder, request)
    if inspection is None:
        with opened_checkpoint(folder, model) as (trained, reserved):
            if not task_facts(trained.config).ranked:
                print_worst_images(trained, folder, request, reserved, names, count or DEFAULT_COUNT, as_json=as_json)
                return
            inspection = evaluate_and_store(folder, trained, request, reserved)
    shown: dict[str, list[InspectedImage]] = {
        name: inspection.images(inspection.ranked(name, split, count or DEFAULT_COUNT))
        for name in LIST_NAMES
        if name in names
    }
    print_unread(inspection.info.unread, inspection.info.unread_count)
    if as_json:
        print_json(inspection_output(inspection, folder, split, shown))
        return
    from tui.screens.tables.evaluation import inspection_lines

    typer.echo("\n".join(inspection_lines(inspection, split, shown)))
    if split != "val" and "label-issues" in shown:
        typer.echo(f"note: {MEMORIZED}", err=True)


def evaluation_overrides(changes: Sequence[str], flags: FlagOverrides) -> list[str]:
    """Return the overrides of an evaluation. Raises UsageError for a key that a flag and an override both set."""
    for change in changes:
        key = change.partition("=")[0].strip()
        if key in flags:
            raise UsageError.one(key, f"is set by {flags[key][0]} and {change}; keep one", code="conflict")
    return [*changes, *(f"{key}={value}" for key, (_, value) in flags.items())]


@contextmanager
def opened_checkpoint(folder: RunFolder, model: ModelOptions) -> Iterator[tuple[TrainedCheckpoint, str]]:
    """Read the chosen checkpoint and reserve the device to evaluate it on. Raises UsageError."""
    check_training("gputrain evaluate")
    from engine.train.inference.device import reserve_device
    from engine.train.inference.trained_model import read_trained_checkpoint

    trained = read_trained_checkpoint(folder, model.checkpoint, raw=not model.ema, code_trust=model.trust)
    with reserve_device(model.gpus, folder.name, print_warning) as reserved:
        yield trained, reserved


def print_evaluation(
    folder: RunFolder, model: ModelOptions, overrides: Sequence[str], split: Split, *, as_json: bool
) -> None:
    """Evaluate a checkpoint and print the result. Raises UsageError."""
    with opened_checkpoint(folder, model) as (trained, reserved):
        from engine.train.inference.evaluate import evaluate_checkpoint

        result = evaluate_checkpoint(trained, overrides, split, reserved)
    print_unread(result.unread, len(result.unread))
    if as_json:
        print_json(evaluation_output(result, trained, folder, split))
    else:
        from tui.screens.tables.evaluation import evaluation_lines

        typer.echo("\n".join(evaluation_lines(result, trained, split)))


def print_worst_images(
    trained: TrainedCheckpoint,
    folder: RunFolder,
    request: InspectionRequest,
    device: str,
    lists: Sequence[str],
    count: int,
    *,
    as_json: bool,
) -> None:
    """Print the images with the greatest losses, for a task without classes. Raises UsageError for other lists."""
    from engine.train.inference.inspect import find_worst_images

    facts = task_facts(trained.config)
    if other := [name for name in lists if name != ListName.MISTAKES]:
        task = trained.config.task.name
        reason = f"{other[0]} lists images by their class, but a model of task {task} has {facts.outputs}"
        raise UsageError.one("--list", reason, f"use --list {ListName.MISTAKES}", code="not-supported")
    images = find_worst_images(trained, request, device, count)
    if as_json:
        listed = [
            {"path": image.name, "loss": finite(image.loss)}
            | {name: [{"name": key, facts.value: value} for key, value in getattr(image, name)] for name in RESULTS}
            for image in images
        ]
        header = {"run": folder.name, "checkpoint": trained.path.name, "split": request.part}
        print_json({**header, facts.outputs: list(trained.classes), "lists": {str(ListName.MISTAKES): listed}})
        return
    from tui.screens.tables.evaluation import worst_image_lines

    typer.echo("\n".join(worst_image_lines(images, facts)))


def evaluate_and_store(
    folder: RunFolder, trained: TrainedCheckpoint, request: InspectionRequest, device: str
) -> Inspection:
    """Evaluate a checkpoint and store the inspection in the folder of the run. Raises UsageError.

    An inspection that cannot be stored is only a warning.
    """
    from engine.train.inference.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(folder, trained, request, device)
    from engine.train.inference.stored_inspection import keep_inspection

    if (problem := keep_inspection(folder, inspection)) is not None:
        print_warning(problem)
    return inspection


def print_unread(files: Iterable[str], count: int) -> None:
    """Name the images that could not be read on stderr."""
    for file in files:
        typer.echo(f"skipped: {printable(file)}", err=True)
    if count:
        typer.echo(f"{pluralize(count, 'image')} could not be read", err=True)


def evaluation_output(
    result: CheckpointEvaluation, checkpoint: TrainedCheckpoint, run: RunFolder, split: Split
) -> dict[str, Any]:
    """Return the output of `gputrain evaluate --json`."""
    evaluation, data, facts = result.evaluation, result.config.data, task_facts(result.config)
    return {
        "run": run.name,
        "checkpoint": str(checkpoint.path),
        "dataset": data.dataset,
        "path": data.path,
        "split": split,
        "tta": result.config.eval.tta,
        "input": {key: getattr(data, key) for key in ("val_resize", "val_crop", "fit", "interpolation")},
        "images": evaluation.metrics.images,
        "unread": len(result.unread),
        "loss": evaluation.metrics.loss,
        "top1": evaluation.metrics.accuracy,
        "top5": evaluation.top5,
        facts.outputs: [
            {"name": name, "images": result.images_per_class[number], facts.per_output: evaluation.per_class[number]}
            | {key: values[number] for key, values in evaluation.details.items()}
            for number, name in enumerate(checkpoint.classes)
        ],
        "confusion": evaluation.confusion,
        "metrics": {**evaluation.own},
    }


def inspection_output(
    inspection: Inspection, run: RunFolder, split: Split, lists: Mapping[str, Sequence[InspectedImage]]
) -> dict[str, Any]:
    """Return the output of `gputrain evaluate --list LIST --json`."""
    info = inspection.info
    return {
        "run": run.name,
        "checkpoint": info.checkpoint,
        "step": info.step,
        "epoch": info.epoch,
        "dataset": info.dataset,
        "folder": info.root,
        "split": split,
        "images": inspection.count(split),
        "wrong": len(inspection.ranked("mistakes", split)),
        "unread": info.unread_count,
        "classes": list(info.classes),
        "lists": {name: [image_json(image, inspection) for image in images] for name, images in lists.items()},
    }


def image_json(image: InspectedImage, inspection: Inspection) -> dict[str, Any]:
    """Return an image for JSON, with class names and the full path of its file; without a file, its name."""
    info = inspection.info
    # JSON has no NaN.
    values = {
        name: None if isinstance(value, float) and not -1e300 < value < 1e300 else value
        for name, value in asdict(image).items()
        if name != "row"
    }
    path = image.path if image.path is None or info.root is None else str(Path(info.root, image.path))
    names = {name: info.classes[getattr(image, name)] for name in ("label", "predicted", "second")}
    return values | {"path": path} | names
