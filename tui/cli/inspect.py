"""`gputrain inspect`: the single images that a trained model gets wrong, doubts, or contradicts the label of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.arguments import (
    JsonOption,
    RunArgument,
    RunsDirOption,
    TrustCodeOption,
    TrustOwnerOption,
    exit_on_usage_error,
    print_warning,
    trust_option,
)
from tui.cli.help import RESULTS, HelpCommand, make_epilog
from tui.cli.trained import CheckpointOption, DeviceOption, RawOption

if TYPE_CHECKING:
    from engine.config.code_trust import CodeTrust
    from engine.inference.stored_inspection import InspectionRequest
    from engine.runs.folder import RunFolder
    from engine.runs.inspection import InspectedImage, Inspection, PartName

app = typer.Typer()

TITLES = {
    "mistakes": "Most confident mistakes",
    "doubtful": "Most doubtful images (the two best classes are close)",
    "labels": "Suspected wrong labels",
}
MEMORIZED = (
    "the model has trained on some of these images and may have learned their wrong labels; inspect images that it has "
    "not trained on (--part val), or an early checkpoint (checkpoint.keep, --checkpoint FILE)"
)


@app.command(
    cls=HelpCommand,
    rich_help_panel=RESULTS,
    epilog=make_epilog(
        [
            "gputrain inspect last",
            "gputrain inspect last --list labels --limit 40",
            "gputrain inspect last --cell cat dog --json",
            "gputrain inspect last data.path=~/other-photos --part all",
        ],
        "Suspected wrong labels: confident learning (Northcutt et al. 2021). A model agrees with a wrong label that it "
        "has memorized, so a list of training images misses some. Every image is in the validation set of some "
        "run.seed: train a few runs with other seeds, and inspect each with --part val. Or inspect a checkpoint of an "
        "early epoch: models learn the right labels first (checkpoint.every_epochs=1, checkpoint.keep).",
    ),
)
def inspect(
    run: RunArgument,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Other data, such as data.path=~/photos.")
    ] = None,
    part: Annotated[str, typer.Option("--part", metavar="PART", help="Images to inspect: val, train or all.")] = "val",
    list_name: Annotated[
        str | None, typer.Option("--list", metavar="LIST", help="Print only this list: mistakes, doubtful or labels.")
    ] = None,
    cell: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--cell", metavar="TRUE PREDICTED", help="List the images of one cell of the confusion matrix instead."
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="List at most N images.")] = 20,
    again: Annotated[bool, typer.Option("--again", help="Evaluate again, although nothing has changed.")] = False,
    checkpoint: CheckpointOption = "best",
    device: DeviceOption = "auto",
    raw: RawOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """List the images that a trained model gets wrong.

    Prints the most confident mistakes, the most doubtful images, and suspected wrong labels, or with --cell the images
    of one cell of the confusion matrix by descending loss. Every image is evaluated once. The result is kept in the
    folder of the run, for the screen and the report, and used again while checkpoint and data are the same.
    """
    from engine.inference.stored_inspection import InspectionRequest, checkpoint_digest, find_stored
    from engine.runs.checkpoint_files import find_checkpoint
    from engine.runs.find import find_run
    from engine.runs.folder import runs_root

    with exit_on_usage_error():
        check_choices(part, list_name, cell)
        folder = find_run(runs_root(runs_dir), run, trust_owner=trust_owner)
        digest = checkpoint_digest(find_checkpoint(folder, checkpoint))
        request = InspectionRequest(digest, raw, tuple(changes or ()), part)  # type: ignore[arg-type]
        inspection = None if again else find_stored(folder, request)
        if inspection is None:
            trust = trust_option(granted=trust_code)
            inspection = evaluate_and_store(folder, checkpoint, device, request, trust)
        lists = choose_lists(inspection, request.part, list_name, cell, limit)
    print_unread(inspection)
    if as_json:
        typer.echo(json.dumps(inspection_json(inspection, folder, request.part, lists), indent=2))
    else:
        typer.echo("\n".join(inspection_lines(inspection, request.part, lists)))
        if request.part != "val" and "labels" in lists:
            typer.echo(f"note: {MEMORIZED}", err=True)


def check_choices(part: str, list_name: str | None, cell: tuple[str, str] | None) -> None:
    """Raise UsageError for a part or a list that does not exist, and for --cell with --list."""
    from engine.utils.errors import UsageError, did_you_mean

    if part not in ("val", "train", "all"):
        raise UsageError.one("--part", f"{part} is not allowed: must be one of val, train, all", code="unknown-value")
    if list_name is not None and list_name not in TITLES:
        reason = f"{list_name} is not allowed: must be one of {', '.join(TITLES)}{did_you_mean(list_name, TITLES)}"
        raise UsageError.one("--list", reason, code="unknown-value")
    if list_name is not None and cell is not None:
        raise UsageError.one(
            "--cell", f"lists the images of a cell, not the list {list_name}; keep one of both", code="conflict"
        )


def evaluate_and_store(
    folder: RunFolder, checkpoint: str, device: str, request: InspectionRequest, trust: CodeTrust
) -> Inspection:
    """Evaluate a checkpoint and store the inspection in the folder of the run. Raises UsageError.

    An inspection that cannot be stored is only a warning.
    """
    from engine.inference.device import reserve_device
    from engine.inference.inspect import inspect_checkpoint
    from engine.inference.trained_model import read_trained_checkpoint
    from engine.runs.inspection_file import write_inspection
    from engine.utils.errors import Problem

    trained = read_trained_checkpoint(folder, checkpoint, raw=request.raw, code_trust=trust)
    with reserve_device(device, folder.name, print_warning) as reserved:
        inspection = inspect_checkpoint(folder, trained, request, reserved)
    if not folder.is_of_this_user:
        print_warning(
            Problem("", f"the result is not kept: {folder.path} belongs to another user", code="foreign-owner")
        )
        return inspection
    try:
        folder.restrict_umask()
        write_inspection(folder, inspection)
    except OSError as error:
        reason = f"the result is not kept: {folder.path} cannot be written to ({error.strerror})"
        print_warning(Problem("", reason, code="not-writable"))
    return inspection


def choose_lists(
    inspection: Inspection, part: PartName, list_name: str | None, cell: tuple[str, str] | None, limit: int
) -> dict[str, list[InspectedImage]]:
    """Return the images of each list to print, by the name of the list. Raises UsageError for an unknown class."""
    from engine.runs.inspection import LIST_NAMES

    if cell is not None:
        true, predicted = (class_index(inspection.info.classes, name) for name in cell)
        return {"cell": inspection.images(inspection.cell(true, predicted, part, limit))}
    return {
        name: inspection.images(inspection.ranked(name, part, limit))
        for name in LIST_NAMES
        if list_name in (None, name)
    }


def class_index(classes: Sequence[str], name: str) -> int:
    """Return the index of a class, which is typed as its name or as its index. Raises UsageError."""
    from engine.utils.errors import UsageError, did_you_mean
    from engine.utils.text import list_names

    if name in classes:
        return classes.index(name)
    if name.isascii() and name.isdigit() and int(name) < len(classes):
        return int(name)
    hint = did_you_mean(name, classes) or f"; its classes are {list_names(classes, 10)}"
    raise UsageError.one("--cell", f"the model has no class {name}{hint}", code="unknown-value")


def print_unread(inspection: Inspection) -> None:
    """Name the images that could not be read on stderr."""
    from engine.utils.text import pluralize, printable

    info = inspection.info
    for file in info.unread:
        typer.echo(f"skipped: {printable(file)}", err=True)
    if info.unread_count:
        typer.echo(f"{pluralize(info.unread_count, 'image')} could not be read", err=True)


def inspection_json(
    inspection: Inspection, run: RunFolder, part: PartName, lists: Mapping[str, Sequence[InspectedImage]]
) -> dict[str, Any]:
    """Return the output of `gputrain inspect --json`."""
    info = inspection.info
    return {
        "format": 1,
        "run": run.name,
        "checkpoint": info.checkpoint,
        "step": info.step,
        "epoch": info.epoch,
        "dataset": info.dataset,
        "folder": info.root,
        "part": part,
        "images": inspection.count(part),
        "wrong": len(inspection.confident_mistakes(part)),
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


def inspection_lines(
    inspection: Inspection, part: PartName, lists: Mapping[str, Sequence[InspectedImage]]
) -> list[str]:
    """Return the report of `gputrain inspect`: what was inspected, then a table for each list."""
    from engine.utils.text import printable
    from tui.tables.mistakes import format_probability

    info, count = inspection.info, inspection.count(part)
    wrong = len(inspection.confident_mistakes(part))
    epoch = "" if info.epoch is None else f" of epoch {info.epoch}"
    parts = "all parts" if part == "all" else f"part {part}"
    source = info.dataset if info.root is None else f"{info.dataset} {info.root}"
    lines = [
        f"{info.checkpoint}{epoch} on {printable(source)}, {parts}",
        f"{count:,} images, {wrong:,} of them wrong ({format_probability(wrong / max(count, 1))})",
    ]
    for name, images in lists.items():
        lines += ["", TITLES.get(name, "Images of the cell, by loss"), *image_table(images, info.classes)]
    return lines


def image_table(images: Sequence[InspectedImage], classes: Sequence[str]) -> list[str]:
    """Return a table of images."""
    from engine.show.table import plain_lines
    from tui.tables.mistakes import plain_columns

    return plain_lines(plain_columns(classes), images) if images else ["(none)"]
