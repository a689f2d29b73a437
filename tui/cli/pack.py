"""`gputrain data pack`: an image folder as tar shards, which load fast."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.command import command
from tui.cli.console import print_json, print_warning
from tui.cli.options import ForceOption, JsonOption, dry_run_option, output_option

if TYPE_CHECKING:
    from engine.data.pack.writer import PackSummary
    from engine.data.sources.folder import ScanProgress

MAX_LISTED_FILES = 10
# Lines of progress where stderr is no terminal.
PLAIN_SECONDS = 10.0


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
    with _Progress() as progress:
        scan = scan_for_pack(request, progress.show_scan)
    for warning in scan.warnings:
        print_warning(warning)
    if dry_run:
        count, size = sum(map(len, scan.paths.values())), expected_size(request, scan)
        if as_json:
            print_json({"output": output, "images": count, "expected_bytes": size})
        else:
            typer.echo(f"{printable(output)} would take about {format_bytes(size)}, {count:,} images")
        return
    with _Progress() as progress:
        summary = write_shards(request, scan, lambda done, total: progress.show(done, total, "images"))
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


class _Progress:
    """A progress bar on stderr; where it is no terminal, a line every `PLAIN_SECONDS`."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._shown = time.monotonic()

    def __enter__(self) -> _Progress:
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
            self._bar = Progress(*columns, console=Console(file=sys.stderr, highlight=False), transient=True)
            self._bar.start()
            self._bar.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_scan(self, progress: ScanProgress) -> None:
        """Show the progress of the scan of the folder."""
        self.show(progress.folders, progress.total_folders, "class folders")

    def show(self, done: float, total: int, unit: str) -> None:
        """Show that `done` of `total` are done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
        elif time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            typer.echo(f"{int(done):,}/{total:,} {unit}", err=True)
