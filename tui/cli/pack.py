"""`gputrain data pack`: an image folder as tar shards, which load fast."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tui.cli.command import command
from tui.cli.console import print_json, print_warning, show_progress
from tui.cli.options import JsonOption, output_option

if TYPE_CHECKING:
    from engine.data.pack.writer import PackSummary

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
    from engine.data.pack.reencode import DEFAULT_QUALITY, Encoding
    from engine.data.pack.writer import PackRequest, scan_for_pack, write_shards
    from engine.utils.errors import UsageError
    from engine.utils.files import expand_user

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
    from engine.utils.text import pluralize, printable
    from engine.utils.units import format_bytes

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
