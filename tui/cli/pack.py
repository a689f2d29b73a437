"""`gputrain data pack`: an image folder as tar shards, which load fast."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tui.cli.command import command
from tui.cli.console import print_json, print_warning, show_progress
from tui.cli.options import ForceOption, JsonOption, dry_run_option, output_option

if TYPE_CHECKING:
    from engine.data.pack.writer import PackSummary

MAX_LISTED_FILES = 10
# Images or class folders between two updates of the progress.
SHOWN_EVERY = 20


@command(
    [
        "gputrain data pack ~/photos -o shards",
        "gputrain data pack ~/imagenet -o shards --max-side 500",
        "gputrain data pack ~/imagenet -o shards --max-side 500 --dry-run",
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
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, max=1024, help="Threads [default: all cores]")
    ] = None,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Allow class folders without a readable image.")
    ] = False,
    force: ForceOption = False,
    dry_run: Annotated[bool, dry_run_option(": the expected size, from a sample of the images.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack an image folder into tar shards that load fast.

    Train on them with data.path=DIR. Classes, training and validation images are those of the folder.
    """
    from engine.data.pack.reencode import DEFAULT_QUALITY, Encoding
    from engine.data.pack.writer import PackRequest, expected_size, scan_for_pack, write_shards
    from engine.utils.errors import UsageError
    from engine.utils.files import expand_user
    from engine.utils.text import printable
    from engine.utils.units import format_bytes

    if output is None:
        advice = f"name the folder to write: gputrain data pack {folder} -o DIR"
        raise UsageError.one("--output", "is missing", advice, code="missing-value")
    encoding = None
    if max_side is not None or quality is not None:
        encoding = Encoding(max_side=max_side, quality=DEFAULT_QUALITY if quality is None else quality)
    request = PackRequest(expand_user(folder), expand_user(output), encoding, threads, allow_empty, force)
    typer.echo("Checking the image files", err=True)
    with _progress_line("class folders") as show:
        scan = scan_for_pack(request, lambda done: show(done.folders, done.total_folders))
    for warning in scan.warnings:
        print_warning(warning)
    if dry_run:
        count, size = sum(map(len, scan.paths.values())), expected_size(request, scan)
        if as_json:
            print_json({"output": output, "images": count, "expected_bytes": size})
        else:
            typer.echo(f"{printable(output)} would take about {format_bytes(size)}, {count:,} images")
        return
    with _progress_line("images") as show:
        summary = write_shards(request, scan, show)
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


@contextmanager
def _progress_line(unit: str) -> Iterator[Callable[[float, int], None]]:
    """Yield what shows on a terminal how many of all are done."""

    def show(done: float, total: int) -> None:
        if done % SHOWN_EVERY < 1:
            show_progress(f"{int(done):,}/{total:,} {unit}")

    try:
        yield show
    finally:
        show_progress("")
