"""`gputrain export`: write a trained model for other programs, and check it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.base.errors import Problem
from engine.base.files import expand_user
from engine.base.text import printable
from engine.runs.folder import RunFolder
from tui.cli.command import command, takes
from tui.cli.completions import complete_evaluation_keys
from tui.cli.console import print_error, print_json, print_warning
from tui.cli.options import ForceOption, JsonOption, output_option
from tui.cli.run_options import ModelOptions, takes_run

if TYPE_CHECKING:
    from engine.train.inference.export_proof import Proof

Format = Literal["safetensors", "torch-export", "onnx"]


@command(
    [
        "gputrain export last",
        "gputrain export fashion-17 --format onnx -o exported/",
        "gputrain export fashion-17 --format onnx data.path=~/photos",
    ],
    exit_codes={0: "success", 1: "the exported model predicts something else", 2: "usage error"},
)
@takes("model", ModelOptions, only=("checkpoint", "ema", "trust_code"))
@takes_run
def export(
    *,
    folder: RunFolder,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Data to check the export with, such as data.path=~/photos.",
            autocompletion=complete_evaluation_keys,
        ),
    ] = None,
    file_format: Annotated[Format, typer.Option("--format", help="Format of the model.")] = "safetensors",
    output: Annotated[str | None, output_option("a folder of files [default: RUN/export]")] = None,
    force: ForceOption = False,
    images: Annotated[
        int,
        typer.Option("--check-images", metavar="N", min=0, help="Validation images to check with; 0 skips it."),
    ] = 512,
    model: ModelOptions,
    as_json: JsonOption = False,
) -> None:
    """Export a trained model for other programs, and check it.

    Writes the weights (safetensors) or a program with normalization, softmax and class names (torch-export, onnx);
    preprocess.py, which reads images for it without gputrain; model.json with classes and origin; and a model card. The
    written file is run on validation images and compared with `gputrain predict`.
    """
    from engine.train.inference.export import export_model
    from engine.train.inference.export_program import require_libraries
    from engine.train.inference.trained_model import read_trained_checkpoint

    require_libraries(file_format)
    target = folder.export if output is None else expand_user(output)
    trained = read_trained_checkpoint(folder, model.checkpoint, raw=not model.ema, code_trust=model.trust)
    paths, proof = export_model(
        trained, folder, target, file_format, force=force, overrides=changes or (), max_images=images
    )
    if as_json:
        print_json(
            {
                "run": folder.name,
                "checkpoint": str(trained.path),
                "files": list(map(str, paths)),
                "proof": proof.to_record(),
            }
        )
    else:
        typer.echo("\n".join(printable(str(path)) for path in paths))
    print_proof(proof, paths[0].name, folder.name)
    raise typer.Exit(0 if proof.passed else 1)


def print_proof(proof: Proof, name: str, run: str) -> None:
    """Say on stderr how the exported file agrees with `gputrain predict`."""
    sentences = proof.describe(name)
    if not proof.passed:
        print_error(Problem("", sentences, code="not-proved"))
    elif proof.not_proved is not None:
        advice = f"Check it with `gputrain export {run} --check-images N data.path=PATH`."
        print_warning(Problem("", f"{sentences} {advice}", code="not-proved"))
    else:
        typer.echo(printable(sentences), err=True)
