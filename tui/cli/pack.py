"""`gputrain data pack` and `gputrain data verify`: an image folder as one file that loads fast."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.command import command
from tui.cli.console import print_warning
from tui.cli.options import ForceOption, JsonOption, dry_run_option, output_option

if TYPE_CHECKING:
    from engine.data.pack.writer import PackPlan, PackProgress, PackRequest, PackSummary
    from engine.data.sources.folder import ScanProgress

MAX_LISTED_FILES = 10
# Lines of progress where stderr is no terminal.
PLAIN_SECONDS = 10.0
# An update of the bar takes longer than to pack a small image.
REFRESH_SECONDS = 0.1
STOPPED = 3


@command(
    [
        "gputrain data pack ~/photos -o photos.gpk",
        "gputrain data pack ~/imagenet -o imagenet.gpk --max-side 500",
        "gputrain data pack ~/imagenet -o imagenet.gpk --max-side 500 --dry-run",
        "gputrain data verify photos.gpk",
        "gputrain run --dataset packed --data-path photos.gpk",
    ],
    "Without --max-side and --quality, the files are packed as they are: training gives the same weights as on the "
    "folder, and is faster because no file is opened per image. With one of them, every image becomes a JPEG of "
    "that quality, upright, without color profile and EXIF data, and with restart markers: the pixels change a "
    "little, the file is smaller, and a random crop decodes only what it needs of it.",
    "An interrupted command continues where it was: run it again. The file appears under its name when it is "
    "complete; until then there is FILE.partial.",
    exit_codes={0: "finished", 2: "usage error, or not possible", 3: "interrupted"},
)
def pack(
    *,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of images with one subfolder per class.")],
    output: Annotated[str | None, output_option("the packed set; required.")] = None,
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
    """Pack an image folder into one file that loads fast.

    Train on it with data.dataset=packed. Classes, training and validation images are those of the folder.
    """
    from engine.data.pack.writer import make_plan
    from engine.utils.errors import UsageError

    if output is None:
        advice = f"name the file to write: gputrain data pack {folder} -o FILE"
        raise UsageError.one("--output", "is missing", advice, code="missing-value")
    request = replace(make_request(folder, output, max_side, quality, threads), allow_empty=allow_empty, force=force)
    typer.echo("Checking the image files", err=True)
    with _Progress() as progress:
        plan = make_plan(request, progress.show_scan)
    for warning in plan.warnings:
        print_warning(warning)
    if dry_run:
        print_expected_size(plan, as_json=as_json)
    else:
        print_summary(run_pack(plan), as_json=as_json)


def make_request(
    folder: str, output: str, max_side: int | None, quality: int | None, threads: int | None
) -> PackRequest:
    """Return the request of the typed arguments. Raises UsageError."""
    from engine.data.pack.reencode import DEFAULT_QUALITY, Encoding
    from engine.data.pack.writer import PackRequest
    from engine.utils.files import expand_user

    encoding = None
    if max_side is not None or quality is not None:
        encoding = Encoding(max_side=max_side, quality=DEFAULT_QUALITY if quality is None else quality)
    return PackRequest(expand_user(folder), expand_user(output), encoding, threads)


def print_expected_size(plan: PackPlan, *, as_json: bool) -> None:
    """Print the number of images and the expected size of a packed set. Raises UsageError."""
    from engine.data.pack.writer import expected_size
    from engine.utils.text import pluralize, printable
    from engine.utils.units import format_bytes

    output, count, size = str(plan.request.output), len(plan.names), expected_size(plan)
    if as_json:
        from tui.cli.model_outputs import PackPlanOutput
        from tui.cli.outputs import print_json

        print_json(PackPlanOutput(output=output, images=count, expected_bytes=size))
    else:
        typer.echo(f"{printable(output)} would take about {format_bytes(size)}, {pluralize(count, 'image')}")


def run_pack(plan: PackPlan) -> PackSummary:
    """Pack with a progress bar. Exits with code 3 when it is interrupted. Raises UsageError."""
    from engine.data.pack.writer import PackStopped, write_pack
    from engine.utils.text import printable

    output = printable(str(plan.request.output))
    with stop_signals() as stopped, _Progress() as progress:
        try:
            return write_pack(plan, progress.show_pack, print_warning, stopped.is_set)
        except PackStopped as stop:
            reason = f"stopped: {stop.done:,} of {stop.total:,} images of {output} are packed"
    typer.echo(f"{reason}; run the same command again, which continues", err=True)
    raise typer.Exit(STOPPED)


def print_summary(summary: PackSummary, *, as_json: bool) -> None:
    """Print what was packed, and the skipped files on stderr."""
    from engine.utils.text import pluralize, printable
    from engine.utils.units import format_bytes

    for name in summary.skipped[:MAX_LISTED_FILES]:
        typer.echo(f"skipped: {printable(name)}", err=True)
    if len(summary.skipped) > MAX_LISTED_FILES:
        typer.echo(f"skipped: {len(summary.skipped) - MAX_LISTED_FILES} more files", err=True)
    if as_json:
        from tui.cli.model_outputs import PackOutput
        from tui.cli.outputs import print_json

        print_json(PackOutput(**asdict(summary)))
        return
    train, val = summary.images["train"], summary.images["val"]
    parts = f"{pluralize(train, 'training image')}, {val:,} for validation" if val else pluralize(train, "image")
    sizes = f"{format_bytes(summary.size_bytes)} from {format_bytes(summary.source_bytes)}"
    typer.echo(f"{printable(summary.output)}: {parts}, {summary.classes} classes, {sizes}")
    path = printable(shlex.quote(summary.output))
    typer.echo(f"train on it: gputrain run --dataset packed --data-path {path}", err=True)


@command(
    ["gputrain data verify photos.gpk"],
    exit_codes={
        0: "all checksums are right",
        1: "damaged, unfinished, or not a packed set",
        2: "usage error, or not possible",
        3: "interrupted",
    },
)
def verify(
    *,
    path: Annotated[str, typer.Argument(metavar="FILE", help="File of `gputrain data pack`.")],
    as_json: JsonOption = False,
) -> None:
    """Check every byte of a packed set.

    Lists what is damaged.
    """
    from engine.data.pack.pack_file import reported_pack_errors
    from engine.utils.files import expand_user
    from engine.utils.text import pluralize, printable

    file = str(expand_user(path))
    with stop_signals() as stopped, _Progress() as progress, reported_pack_errors(file, "FILE"):
        images, damaged = _find_damage(file, progress, stopped)
    for problem in damaged:
        typer.echo(f"error: {printable(problem)}", err=True)
    if stopped.is_set():
        typer.echo("stopped: not all images were checked", err=True)
        raise typer.Exit(STOPPED)
    if as_json:
        from tui.cli.model_outputs import VerifyOutput
        from tui.cli.outputs import print_json

        print_json(VerifyOutput(file=path, images=images, damaged=damaged))
    elif images is not None and not damaged:
        typer.echo(f"{printable(path)}: {pluralize(images, 'image')}, all checksums are right")
    if damaged:
        if images is not None:
            typer.echo(f"{pluralize(len(damaged), 'image')} of {images:,} damaged", err=True)
        raise typer.Exit(1)


def _find_damage(path: str, progress: _Progress, stopped: threading.Event) -> tuple[int | None, list[str]]:
    """Return the number of images and a sentence for each damaged one. Without a valid index, the number is None.

    Raises OSError.
    """
    from engine.data.pack.pack_file import InvalidPackError, Pack
    from engine.data.pack.verify import damaged_images

    try:
        pack = Pack(path)
        count = pack.num_images
        return count, list(damaged_images(pack, lambda done: progress.show_verify(done, count), stopped.is_set))
    except InvalidPackError as error:
        return None, [f"{path} {error}; {error.advice}"]


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, instead of ending the process. A second one ends it."""
    event = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def restore(*_: Any) -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def stop(*_: Any) -> None:
        event.set()
        restore()

    previous = {number: signal.signal(number, stop) for number in signals}
    try:
        yield event
    finally:
        restore()


class _Progress:
    """A progress bar on stderr; where it is no terminal, a line every `PLAIN_SECONDS`."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._start = self._shown = time.monotonic()
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> _Progress:
        if sys.stderr is None or not sys.stderr.isatty():
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[rate]}", markup=False))
        console = Console(file=sys.stderr, highlight=False)
        remaining = TimeRemainingColumn(compact=True)
        self._bar = Progress(*columns, remaining, console=console, transient=True, refresh_per_second=4)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_scan(self, progress: ScanProgress) -> None:
        """Show the progress of the scan of the folder."""
        self._show(progress.folders, progress.total_folders, "class folders", progress.files, "")

    def show_pack(self, progress: PackProgress) -> None:
        """Show the progress of packing, with the expected size."""
        from engine.utils.units import format_bytes

        note = f"  about {format_bytes(progress.expected_bytes)}" if progress.done and self._is_due() else ""
        self._show(progress.done, progress.total, "images", progress.done, note)

    def show_verify(self, done: int, total: int) -> None:
        """Show how many of the images are verified."""
        self._show(done, total, "images", done, "")

    def _is_due(self) -> bool:
        interval = PLAIN_SECONDS if self._bar is None else REFRESH_SECONDS
        return time.monotonic() - self._shown >= interval

    def _show(self, done: float, total: int, unit: str, images: int, note: str) -> None:
        """Show that `done` of `total` are done. The first call does not count as work of this process."""
        if self._first is None:
            self._first, self._start = (done, images), time.monotonic()
            if self._bar is not None:
                self._bar.add_task("", total=total, completed=done, rate="")
            return
        if not self._is_due():
            return
        from engine.utils.units import format_duration, format_rate

        self._shown = time.monotonic()
        seconds, (first_done, first_images) = max(self._shown - self._start, 1e-9), self._first
        rate = f"{format_rate((images - first_images) / seconds)} images/s{note}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, rate=rate)
        else:
            left = (total - done) * seconds / max(done - first_done, 1e-9)
            typer.echo(f"{int(done):,}/{total:,} {unit}  {rate}  {format_duration(left)} left", err=True)
