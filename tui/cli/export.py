"""Command `export`: write a trained model for other programs, and check it."""

from __future__ import annotations

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
from tui.cli.trained import CheckpointOption, RawOption

if TYPE_CHECKING:
    from engine.inference.export import Export
    from engine.inference.trained_model import TrainedCheckpoint
    from engine.runs.folder import RunFolder

app = typer.Typer()


@app.command(
    cls=HelpCommand,
    rich_help_panel=RESULTS,
    epilog=make_epilog(
        [
            "gputrain export last",
            "gputrain export fashion-17 --format onnx --output exported/",
            "gputrain export fashion-17 --format onnx data.path=~/photos",
        ],
        exit_codes={0: "success", 1: "the exported model predicts something else", 2: "usage error"},
    ),
)
def export(
    run: RunArgument,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Data to check the export with, such as data.path=~/photos."),
    ] = None,
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, torch-export or onnx.")
    ] = "safetensors",
    output: Annotated[
        str | None, typer.Option("--output", metavar="DIR", help="Folder to write to [default: RUN/export]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files of another run or program.")] = False,
    images: Annotated[
        int,
        typer.Option("--images", metavar="N", min=0, help="Number of validation images to check with; 0 skips it."),
    ] = 512,
    checkpoint: CheckpointOption = "best",
    raw: RawOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Export a trained model for other programs, and check it.

    Writes the weights (safetensors) or a program with normalization, softmax and class names (torch-export, onnx);
    preprocess.py, which reads images for it without gputrain; model.json with every step; and a model card. The written
    file is run on validation images and compared with `gputrain predict`.
    """
    from engine.inference.export import ExportOptions, export_model
    from engine.inference.export_program import require_format
    from engine.inference.trained_model import read_trained_checkpoint
    from engine.runs.find import find_run
    from engine.runs.folder import runs_root
    from engine.utils.codec import encode_indented
    from engine.utils.files import expand_user
    from engine.utils.text import printable

    with exit_on_usage_error():
        options = ExportOptions(require_format(file_format), force, tuple(changes or ()), images)
        folder = find_run(runs_root(runs_dir), run, trust_owner=trust_owner)
        target = folder.export if output is None else expand_user(output)
        trust = trust_option(granted=trust_code)
        trained = read_trained_checkpoint(folder, checkpoint, raw=raw, code_trust=trust)
        exported = export_model(trained, folder, target, options)
    if as_json:
        typer.echo(encode_indented(export_json(exported, folder, trained)).decode())
    else:
        typer.echo("\n".join(printable(str(path)) for path in exported.paths))
    print_proof(exported, folder.name)
    raise typer.Exit(0 if exported.proof.passed else 1)


def print_proof(exported: Export, run: str) -> None:
    """Say on stderr how the exported file agrees with `gputrain predict`."""
    from engine.inference.export_proof import NOT_REQUESTED
    from engine.utils.errors import Problem
    from engine.utils.text import printable

    proof, name = exported.proof, exported.paths[0].name
    sentences = proof.describe(name)
    if proof.faults:
        print_error(Problem("", sentences, code="not-proved"))
    elif proof.not_proved is not None:
        key = "--images N" if proof.not_proved == NOT_REQUESTED else "data.path=PATH"
        print_warning(Problem("", f"{sentences} Check it with `gputrain export {run} {key}`.", code="not-proved"))
    else:
        typer.echo(printable(sentences), err=True)


def export_json(exported: Export, run: RunFolder, checkpoint: TrainedCheckpoint) -> dict[str, Any]:
    """Return the output of `gputrain export --json`."""
    return {
        "format": 1,
        "run": run.name,
        "checkpoint": str(checkpoint.path),
        "files": list(map(str, exported.paths)),
        "proof": exported.proof.to_record(),
    }
