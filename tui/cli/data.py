"""`gputrain data`: classes and images of a dataset before training."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.base.errors import UsageError, file_errors
from engine.base.files import expand_user, replace_file
from engine.base.output_file import check_output
from engine.base.text import pluralize, printable
from engine.base.units import format_bytes
from tui.cli.command import command
from tui.cli.config_arguments import (
    ConfigArguments,
    FlagOverrides,
    code_trust,
    config_flags,
    print_no_effect,
    resolve_arguments,
)
from tui.cli.console import print_json, print_warning, show_progress
from tui.cli.options import ForceOption, JsonOption, TrustCodeOption, output_option

if TYPE_CHECKING:
    from PIL.Image import Image

    from engine.train.data.pack import PackSummary


@command(
    [
        "gputrain data flowers.yaml",
        "gputrain data flowers.yaml --augmented -o sheet.png",
        "gputrain data ~/photos/labels.csv --task multilabel",
        "gputrain data pack ~/photos -o shards",
    ]
)
@config_flags("model", "dataset", "data_path", "task", "image_size")
def show(
    *,
    arguments: ConfigArguments = None,
    flags: FlagOverrides,
    augmented: Annotated[
        bool, typer.Option("--augmented", help="Show training images with the augmentation of the config.")
    ] = False,
    output: Annotated[str | None, output_option("a PNG file of the images.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Show classes and images of a dataset before training.

    Prints the number of images of each class or label, or the range of numbers, sizes and modes of the image files, and
    skipped files. On a terminal, or with -o, also shows images of each class as the network sees them.
    """
    path = expand_user(output) if output is not None else None
    if path is not None:
        check_output(path, "images.png", force=force)
    resolved = resolve_arguments(arguments, flags, trust_code=trust_code)
    print_no_effect(resolved)
    keys = ("model.name", "data.dataset", *(("augment.transform",) if augmented else ()))
    code_trust(resolved, granted=trust_code).check(resolved.config, keys)
    # Imports torch, so only after the checks that need none.
    from engine.train.data.checks import check_dataset, dataset_warnings
    from engine.train.dataset_view import contact_sheet, open_dataset

    opened = open_dataset(resolved.config)
    shows = not as_json and sys.stdout.isatty()
    if as_json:
        print_json(opened.to_dict())
    else:
        from tui.screens.tables.dataset import dataset_lines

        typer.echo("\n".join(dataset_lines(opened)))
    for warning in dataset_warnings(opened.config, opened.source):
        print_warning(warning)
    check_dataset(opened.config, opened.source)
    if path is None and (not shows or opened.image_format.is_float):
        return
    sheet = contact_sheet(opened, augmented=augmented)
    if path is not None:
        _write_png(sheet, path)
        typer.echo(f"wrote {path}", err=True)
    if shows:
        show_picture(sheet)


def _write_png(sheet: Image, path: Any) -> None:
    """Raises UsageError."""
    with file_errors("--output", f"{path} cannot be written", code="not-writable"):
        replace_file(path, lambda file: sheet.save(file, "PNG"))


def show_picture(picture: Image) -> None:
    """Draw a picture on the terminal, as wide as that."""
    from rich.console import Console
    from rich.segment import Segment, Segments

    from tui.terminal.pictures import draw_picture

    console = Console()
    # As wide as the terminal, however high: the text above scrolls.
    columns = max(console.width - 1, 1)
    drawn = draw_picture(picture, columns, -(-picture.height * columns // (2 * picture.width)))
    for line in drawn.lines:
        console.print(Segments([*line, Segment.line()]), end="")


MAX_LISTED_FILES = 10
# Images between two updates of the progress.
SHOWN_EVERY = 20


@command(
    [
        "gputrain data pack ~/photos -o shards",
        "gputrain data pack ~/imagenet -o shards --max-side 500",
        "gputrain run --data-path shards",
    ],
    "The shards are tar files in the format of WebDataset, with the class names in classes.txt. Without --max-side and "
    "--quality, they have the files as they are: training gives the same weights as on the folder, and is faster where "
    "opening many files is slow. With one of them, every image becomes a JPEG of that quality, upright, without color "
    "profile and EXIF data: the pixels change a little, and the shards are smaller.",
    "The folder of shards appears when it is complete.",
)
def pack(
    *,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of images with one subfolder per class.")],
    output: Annotated[str | None, output_option("the folder of the shards; required.")] = None,
    max_side: Annotated[
        int | None,
        typer.Option("--max-side", metavar="PIXELS", min=1, max=65_000, help="Reduce larger images to this side."),
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option("--quality", metavar="Q", min=1, max=100, help="JPEG quality, 90 with --max-side."),
    ] = None,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Allow class folders without a readable image.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack an image folder into tar shards that load fast.

    Train on them with data.path=DIR. Classes, training and validation images are those of the folder.
    """
    from engine.train.data.pack import DEFAULT_QUALITY, Encoding, PackRequest, scan_for_pack, write_shards

    if output is None:
        advice = f"name the folder to write: gputrain data pack {folder} -o DIR"
        raise UsageError.one("--output", "is missing", advice, code="missing-value")
    encoding = None
    if max_side is not None or quality is not None:
        encoding = Encoding(max_side=max_side, quality=DEFAULT_QUALITY if quality is None else quality)
    request = PackRequest(expand_user(folder), expand_user(output), encoding, allow_empty)
    typer.echo("Checking the image files", err=True)
    scan = scan_for_pack(request)
    for warning in scan.warnings:
        print_warning(warning)
    try:
        summary = write_shards(request, scan, _show_progress)
    finally:
        show_progress("")
    if as_json:
        print_json(asdict(summary))
    else:
        _print_summary(summary)


def _print_summary(summary: PackSummary) -> None:
    """Print what was packed, and the skipped files on stderr."""
    for name in summary.skipped[:MAX_LISTED_FILES]:
        typer.echo(f"skipped: {printable(name)}", err=True)
    if len(summary.skipped) > MAX_LISTED_FILES:
        typer.echo(f"skipped: {len(summary.skipped) - MAX_LISTED_FILES} more files", err=True)
    train, val = summary.images["train"], summary.images["val"]
    parts = f"{pluralize(train, 'training image')}, {val:,} for validation" if val else pluralize(train, "image")
    sizes = f"{format_bytes(summary.size_bytes)} from {format_bytes(summary.source_bytes)}"
    typer.echo(f"{printable(summary.output)}: {parts}, {summary.classes} classes, {sizes}")
    typer.echo(f"train on it: gputrain run --data-path {printable(shlex.quote(summary.output))}", err=True)


def _show_progress(done: int, total: int) -> None:
    if done % SHOWN_EVERY == 0:
        show_progress(f"{done:,}/{total:,} images")
