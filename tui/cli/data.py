"""`gputrain data`: classes and images of a dataset before training."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.arguments import (
    ConfigArguments,
    JsonOption,
    TrustCodeOption,
    code_trust,
    exit_on_usage_error,
    flag_overrides,
    print_no_effect,
    print_warning,
    resolve_arguments,
)
from tui.cli.help import TRAIN, ConfigCommand, make_epilog

if TYPE_CHECKING:
    from PIL.Image import Image

    from engine.doctor.dataset import Dataset

app = typer.Typer()

DATA_FORMAT = 1
MAX_LISTED_FILES = 10


@app.command(
    cls=ConfigCommand,
    rich_help_panel=TRAIN,
    epilog=make_epilog(
        [
            "gputrain data flowers.yaml",
            "gputrain data flowers.yaml --augmented -o sheet.png",
            "gputrain data data.dataset=folder data.path=~/photos --json",
        ]
    ),
)
def data(
    arguments: ConfigArguments = None,
    model: Annotated[str | None, typer.Option("--model")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset")] = None,
    data_path: Annotated[str | None, typer.Option("--data-path")] = None,
    augmented: Annotated[
        bool, typer.Option("--augmented", help="Show training images with the augmentation of the config.")
    ] = False,
    part: Annotated[str, typer.Option("--part", metavar="PART", help="Images to show: train or val.")] = "train",
    columns: Annotated[
        int, typer.Option("--images", metavar="N", min=0, max=32, help="Images to show of each class; 0 shows none.")
    ] = 8,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the images to a PNG file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Show classes and images of a dataset before training.

    Prints the number of images of each class, sizes and modes of the image files, and skipped files. On a terminal, or
    with -o, also shows images of each class as the network sees them: resized and cropped, and with --augmented also
    augmented. Pictures need no graphics of the terminal; GPUTRAIN_GRAPHICS=sixel or kitty draws them finer.
    """
    from engine.utils.errors import UsageError
    from engine.utils.files import expand_user, shown_path

    with exit_on_usage_error():
        if part not in ("train", "val"):
            raise UsageError.one("--part", f"{part} is not allowed: must be train or val", code="unknown-value")
        if augmented and part == "val":
            raise UsageError.one("--augmented", "has no effect on validation images; omit --part val", code="no-effect")
        path = expand_user(output) if output is not None else None
        if path is not None and os.path.lexists(path) and not force:
            raise UsageError.one(
                "--output", f"{output} exists; choose another file, or overwrite it with --force", code="name-in-use"
            )
        flags = flag_overrides({"model": model, "dataset": dataset, "data_path": data_path})
        resolved = resolve_arguments(arguments, flags, trust_code=trust_code)
        print_no_effect(resolved)
        keys = ("model.name", "data.dataset", *(("augment.transform",) if augmented else ()))
        code_trust(resolved, granted=trust_code).check(resolved.config, keys)
        # Imports torch, so only after the checks that need none.
        from engine.data.batching import dataset_warnings
        from engine.doctor.dataset import contact_sheet, open_dataset

        opened = open_dataset(resolved.config)
        shows = columns > 0 and not as_json and sys.stdout.isatty()
        if as_json:
            typer.echo(json.dumps(dataset_json(opened), indent=2))
        else:
            typer.echo("\n".join(dataset_lines(opened)))
        for warning in dataset_warnings(opened.config, opened.source):
            print_warning(warning)
        if path is None and (not shows or opened.image_format.is_float):
            return
        sheet = contact_sheet(opened, part, max(columns, 1), augmented=augmented)  # type: ignore[arg-type]
        if path is not None:
            _write_png(sheet, path)
            typer.echo(f"wrote {shown_path(path)}", err=True)
    if shows:
        show_picture(sheet)


def _write_png(sheet: Image, path: Any) -> None:
    """Raises UsageError."""
    from engine.utils.errors import UsageError
    from engine.utils.files import replace_file

    try:
        replace_file(path, lambda file: sheet.save(file, "PNG"))
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror or error}"
        raise UsageError.one("--output", reason, code="not-writable") from error


def show_picture(picture: Image) -> None:
    """Draw a picture on the terminal, in at most its width and height. Asks the terminal nothing."""
    from rich.console import Console
    from rich.segment import Segment, Segments

    from engine.utils.errors import UsageError
    from tui.graphics import Graphics, cell_size, known_protocol, requested_protocol
    from tui.pictures import draw_picture

    protocol = None
    try:
        protocol = requested_protocol(os.environ)
    except UsageError as error:
        print_warning(error.problems[0])
    protocol = protocol or known_protocol(os.environ) or "blocks"
    graphics = Graphics(protocol, cell_size(sys.stdout.fileno()) or Graphics().cell)
    console = Console()
    columns = max(console.width - 1, 1)
    # As wide as the terminal, however high: the text above scrolls.
    rows = -(-picture.height * columns * graphics.cell[0] // (picture.width * graphics.cell[1]))
    drawn = draw_picture(picture, columns, max(rows, 1), graphics)
    if drawn.overlay:
        typer.echo(drawn.overlay)
        return
    typer.echo(drawn.setup, nl=False)
    for line in drawn.lines:
        console.print(Segments([*line, Segment.line()]), end="")


def dataset_lines(dataset: Dataset) -> list[str]:
    """Return the report of `gputrain data`: a bar per class, image files, input of the network, skipped files."""
    from engine.show.table import plain_lines
    from engine.utils.text import pluralize, printable
    from tui.tables import fact_lines
    from tui.tables.classes import ClassCount, count_columns

    train, val = dataset.counts["train"], dataset.counts["val"]
    rows = [ClassCount(*counts) for counts in zip(dataset.source.classes, train, val, strict=True)]
    total = ClassCount("all", sum(train), sum(val), is_total=True)
    lines = [*plain_lines(count_columns(max((*train, 1))), [*rows, total]), ""]
    facts: dict[str, object] = {}
    if (files := dataset.files) is not None:
        smallest, median, largest = (f"{width} x {height}" for width, height in files.sizes)
        modes = ", ".join(f"{mode} {count:,}" for mode, count in files.modes.items())
        differ = len(set(files.sizes)) > 1
        facts["image files"] = f"{smallest} to {largest}, median {median}" if differ else median
        facts["modes"] = f"{modes} of {pluralize(files.examined, 'examined file')}"
    facts["input"] = f"{dataset.image_format.describe()}, channels {dataset.image_format.channels}"
    skipped = dataset.source.skipped
    if skipped:
        facts["skipped"] = f"{pluralize(len(skipped), 'file')}:"
    lines += fact_lines(facts)
    lines += [f"  {printable(name)}" for name in skipped[:MAX_LISTED_FILES]]
    if len(skipped) > MAX_LISTED_FILES:
        lines.append(f"  and {len(skipped) - MAX_LISTED_FILES} more")
    return lines


def dataset_json(dataset: Dataset) -> dict[str, Any]:
    """Return the output of `gputrain data --json`."""
    from dataclasses import asdict

    data = dataset.config.data
    return {
        "format": DATA_FORMAT,
        "dataset": data.dataset,
        "path": data.path,
        "classes": [
            {"name": name, "train": in_train, "val": in_val}
            for name, in_train, in_val in zip(
                dataset.source.classes, dataset.counts["train"], dataset.counts["val"], strict=True
            )
        ],
        "files": None if dataset.files is None else asdict(dataset.files),
        "input": asdict(dataset.image_format),
        "skipped": list(dataset.source.skipped),
    }
