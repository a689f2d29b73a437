"""`gputrain features`: write the features that a trained model computes for a folder of images."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

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
    from engine.inference.predict import InputFile

app = typer.Typer()


@app.command(
    cls=HelpCommand,
    rich_help_panel=RESULTS,
    epilog=make_epilog(
        ["gputrain features last photos/ -o features.npz", "gputrain features last photos/ --layer layer3 --no-pool"]
    ),
)
def features(
    run: RunArgument,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of images, searched recursively.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="File to write.")] = "features.npz",
    layer: Annotated[
        str | None,
        typer.Option(
            "--layer",
            metavar="NAME",
            help="Layer whose output is written, by default the last stage of `gputrain summary --features`.",
        ),
    ] = None,
    no_pool: Annotated[
        bool, typer.Option("--no-pool", help="Write whole feature maps instead of their mean over all pixels.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    checkpoint: CheckpointOption = "best",
    device: DeviceOption = "auto",
    raw: RawOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Extract features of images with a trained model.

    Writes the output of a layer for each image to a file for numpy.load: features (float32), paths, labels (index into
    classes, -1 without a class folder), classes and layer. Images are preprocessed as by predict. Files that are not
    images are skipped with a message.
    """
    from engine.inference.device import reserve_device
    from engine.inference.features import extract_features
    from engine.inference.predict import find_input_files
    from engine.inference.trained_model import load_trained_model
    from engine.runs.find import find_run
    from engine.runs.folder import runs_root
    from engine.utils.errors import Problem, UsageError
    from engine.utils.files import expand_user, is_folder, shown_path
    from engine.utils.text import pluralize, printable

    def print_skipped(file: InputFile, error: Problem) -> None:
        typer.echo(f"skipped: {printable(f'{file.path} {error}')}", err=True)

    with exit_on_usage_error(), ExitStack() as reservation:
        run_folder, images, target = (
            find_run(runs_root(runs_dir), run, trust_owner=trust_owner),
            *map(expand_user, (folder, output)),
        )
        if not is_folder(images):
            raise UsageError.one("FOLDER", f"{folder} is not a folder", "name a folder of images", code="not-a-folder")
        if is_folder(target) or not is_folder(target.absolute().parent):
            raise UsageError.one("--output", f"{output} must be a file in an existing folder", code="not-writable")
        if os.path.lexists(target) and not force:
            raise UsageError.one(
                "--output", f"{output} exists; choose another file, or overwrite it with --force", code="name-in-use"
            )
        files = list(find_input_files([images]))
        reserved = reservation.enter_context(reserve_device(device, run_folder.name, print_warning))
        trust = trust_option(granted=trust_code)
        trained = load_trained_model(run_folder, checkpoint, device=reserved, raw=raw, code_trust=trust)
        result = extract_features(
            trained, images, files, target.absolute(), layer=layer, pool=not no_pool, report=print_skipped
        )
    if as_json:
        values = {
            "format": 1,
            "run": run_folder.name,
            "checkpoint": str(trained.checkpoint.path),
            "file": str(target),
            "layer": result.layer,
            "shape": list(result.shape),
            "classes": list(result.classes),
            "unread": result.unread,
        }
        typer.echo(json.dumps(values, indent=2))
        return
    shape = "x".join(map(str, result.shape[1:])) or "1"
    labels = f", {pluralize(len(result.classes), 'class folder')}" if result.classes else ""
    rows = f"{pluralize(result.shape[0], 'image')}, {shape} features each of layer {result.layer}{labels}"
    typer.echo(printable(f"{shown_path(target)}: {rows}"))
