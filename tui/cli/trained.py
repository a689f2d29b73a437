"""The commands for a run that is trained: predict, evaluate and export."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.arguments import AsJson, RunName, RunsDir, usage_errors

if TYPE_CHECKING:
    from engine.inference.evaluate import Measured
    from engine.inference.predict import Answer
    from engine.inference.trained_model import Saved
    from engine.runs.folder import RunFolder

app = typer.Typer(rich_markup_mode=None)

Checkpoint = Annotated[
    str, typer.Option("--checkpoint", metavar="WHICH", help="Which of the run's checkpoints: best, last, or a file.")
]
Device = Annotated[
    str, typer.Option("--device", help="auto (the GPU where there is one that works), cpu, cuda or cuda:N.")
]
Raw = Annotated[bool, typer.Option("--raw", help="The weights themselves, where averaged ones were saved as well.")]

MOST_PATH, MOST_NAME = 60, 24
# The confusion matrix of more classes does not fit on a page.
MATRIX_CLASSES = 20


@app.command(epilog="Example: gputrain predict last photo.jpg --top 3")
def predict(
    run: RunName,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Image files, and folders of them.")],
    top: Annotated[int, typer.Option("--top", min=1, help="How many classes to name for each image.")] = 5,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    raw: Raw = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Say what a trained model takes images for.

    Names the likeliest classes of each image, with their probabilities. Images are brought to the form that the model
    was trained with. In folders, at any depth, what is no image is passed over with a message. Exit codes: 0 every
    image that was named could be read, 1 one could not, 2 bad usage.
    """
    from engine.inference.predict import files_in
    from engine.inference.predict import predict as answers_for
    from engine.inference.trained_model import load_trained
    from engine.runs.folder import find_run, runs_root
    from engine.utils.files import expand

    with usage_errors():
        folder = find_run(runs_root(runs_dir), run)
        files = list(files_in([expand(image) for image in images]))
        trained = load_trained(folder, checkpoint, device=device, raw=raw)
    faults: list[Answer] = []
    answers = readable(answers_for(trained, files, top), faults)
    if as_json:
        print_json(answers, folder, trained.saved)
    else:
        paths = min(max((width_of(str(given.path)) for given in files), default=0), MOST_PATH)
        names = min(max(map(width_of, trained.saved.classes)), MOST_NAME)
        for answer in answers:
            typer.echo(answer_line(answer, paths, names))
    if not files:
        typer.echo("error: there is no file in the folders that were named", err=True)
    raise typer.Exit(1 if not files or any(fault.given.named for fault in faults) else 0)


def readable(answers: Iterator[Answer], faults: list[Answer]) -> Iterator[Answer]:
    """Those of images that could be read; the others are told, and put into `faults`."""
    from engine.utils.text import printable

    for answer in answers:
        if answer.fault is None:
            yield answer
            continue
        faults.append(answer)
        kind = "error" if answer.given.named else "passed over"
        typer.echo(f"{kind}: {printable(f'{answer.given.path} {answer.fault}')}", err=True)


def print_json(answers: Iterator[Answer], run: RunFolder, saved: Saved) -> None:
    """One JSON object, an image a line, written as the answers come."""
    from engine.inference.predict import as_number

    head = json.dumps({"format": 1, "run": run.name, "checkpoint": str(saved.path)})
    typer.echo(f'{head[:-1]}, "images": [', nl=False)
    between = "\n"
    for answer in answers:
        classes = [{"name": name, "probability": as_number(share)} for name, share in answer.classes]
        typer.echo(between + json.dumps({"path": str(answer.given.path), "classes": classes}), nl=False)
        between = ",\n"
    typer.echo("\n]}")


def answer_line(answer: Answer, path: int, name: int) -> str:
    (best, share), *others = answer.classes
    rest = ", ".join(f"{padded(other, 0)} {likely:.4f}" for other, likely in others)
    return f"{padded(str(answer.given.path), path)}  {padded(best, name)}  {share:.4f}  {rest}".rstrip()


def padded(text: str, width: int) -> str:
    """What comes from outside, fit for a terminal and at least so many cells wide."""
    from engine.utils.text import printable

    return printable(text) + " " * (width - width_of(text))


def width_of(text: str) -> int:
    from rich.cells import cell_len

    from engine.utils.text import printable

    return cell_len(printable(text))


@app.command(epilog="Example: gputrain evaluate last data.path=~/other-photos --part all")
def evaluate(
    run: RunName,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Other data, such as data.path=~/photos.")
    ] = None,
    part: Annotated[
        str, typer.Option("--part", help="Which images: val (the validation part), train, or all of them.")
    ] = "val",
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    raw: Raw = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Count again how good a trained model is.

    Tells the loss, the accuracy of each class, and which was taken for which. Takes the validation images that the run
    had, or other data, whose classes are known by their names; each image once, in float32.
    """
    from engine.inference.evaluate import measure
    from engine.inference.trained_model import read_saved
    from engine.runs.folder import find_run, runs_root
    from engine.utils.errors import UsageError

    with usage_errors():
        if part not in ("val", "train", "all"):
            raise UsageError.one("--part", f"{part} is not allowed: must be one of val, train, all")
        folder = find_run(runs_root(runs_dir), run)
        saved = read_saved(folder, checkpoint, raw=raw)
        measured = measure(saved, changes or [], part, device)  # type: ignore[arg-type]
    if measured.unread:
        from engine.utils.text import counted, printable

        for file in measured.unread:
            typer.echo(f"left out: {printable(file)}", err=True)
        typer.echo(f"{counted(len(measured.unread), 'image')} could not be read", err=True)
    if as_json:
        typer.echo(json.dumps(evaluation_json(measured, saved, folder, part), indent=2))
    else:
        typer.echo("\n".join(evaluation_lines(measured, saved, part)))


def evaluation_json(measured: Measured, saved: Saved, run: RunFolder, part: str) -> dict[str, Any]:
    found, data = measured.evaluation, measured.config.data
    return {
        "format": 1,
        "run": run.name,
        "checkpoint": str(saved.path),
        "dataset": data.dataset,
        "path": data.path,
        "part": part,
        "images": found.sums.images,
        "unread": len(measured.unread),
        "loss": found.sums.loss if math.isfinite(found.sums.loss) else None,
        "top1": found.sums.accuracy,
        "top5": found.top5,
        "classes": [
            {"name": name, "images": images, "accuracy": accuracy}
            for name, images, accuracy in zip(saved.classes, measured.images, found.per_class, strict=True)
        ],
        "confusion": found.confusion,
    }


def evaluation_lines(measured: Measured, saved: Saved, part: str) -> list[str]:
    from tui.text.confusion import matrix_lines
    from tui.text.tables import NONE

    found, data = measured.evaluation, measured.config.data
    where = data.dataset if data.path is None else f"{data.dataset} in {data.path}"
    name = max(width_of("class"), *(width_of(one) for one in saved.classes))
    lines = [
        f"{saved.path.name} on {padded(where, 0)}, {'all parts' if part == 'all' else f'part {part}'}",
        f"{found.sums.images:,} images  loss {found.sums.loss:.4f}  top-1 {found.sums.accuracy:.4f}"
        f"  top-5 {found.top5:.4f}",
        "",
        f"{'class':<{name}}  images  accuracy",
    ]
    for one, images, accuracy in zip(saved.classes, measured.images, found.per_class, strict=True):
        lines.append(f"{padded(one, name)}  {images:>6}  " + (NONE if accuracy is None else f"{accuracy:.4f}"))
    if len(saved.classes) <= MATRIX_CLASSES:
        lines += ["", "which class (row) was taken for which (column)"]
        lines += matrix_lines([padded(one, 0) for one in saved.classes], found.confusion)
    return lines


@app.command(epilog="Example: gputrain export last --output flowers")
def export(
    run: RunName,
    output: Annotated[
        str | None, typer.Option("--output", metavar="DIR", help="Folder to write to [default: RUN/export]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there, also of something else.")] = False,
    checkpoint: Checkpoint = "best",
    raw: Raw = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained model for other programs.

    Its weights become model.safetensors; its classes, and what is done to an image before it sees it, model.json.
    """
    from engine.inference.export import export as write
    from engine.inference.trained_model import read_saved
    from engine.runs.folder import find_run, runs_root
    from engine.utils.files import expand

    with usage_errors():
        folder = find_run(runs_root(runs_dir), run)
        place = folder.path / "export" if output is None else expand(output)
        paths = write(read_saved(folder, checkpoint, raw=raw), folder, place, force=force)
    if as_json:
        typer.echo(json.dumps({"format": 1, "run": folder.name, "files": list(map(str, paths))}, indent=2))
    else:
        typer.echo("\n".join(padded(str(path), 0) for path in paths))
