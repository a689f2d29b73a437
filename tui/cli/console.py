"""Prints tables, JSON, lines of styled text as wide as the terminal, errors and warnings."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import typer

from engine.base.errors import Problem, UsageError
from engine.base.exit_codes import ExitCode
from engine.base.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from engine.base.codec import Record
    from engine.report.table import Column, Row
    from engine.runs.find import OpenedRun
    from engine.watch.points import Point

NON_TTY_COLUMNS = 120
# Before a command says that it reads, and between two lines that do.
PATIENCE_SECONDS, REFRESH_SECONDS = 1.0, 0.25
MAX_ASKED_LINES = 20


def print_table(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> None:
    """Print the titles and all cells of a table in full."""
    from engine.report.table import plain_lines

    for line in plain_lines(columns, rows):
        typer.echo(line)


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    """Print lines without wrapping them."""
    for line in lines:
        console.print(line, soft_wrap=True)


def show_frames(console: Console, frames: Iterable[Iterable[Text]], *, in_place: bool) -> None:
    """Print the lines of each frame, or draw them in place of those before."""
    from rich.live import Live

    from tui.screens.tables import joined

    with Live(console=console, auto_refresh=False) if in_place else nullcontext() as live:
        for lines in frames:
            if live is None:
                print_lines(console, lines)
            else:
                live.update(joined(lines), refresh=True)


def print_points(points: Iterable[Point]) -> None:
    """Print the points of curves as CSV. A value that is not finite is nan or inf."""
    import csv

    from engine.report.curve_points import POINT_FIELDS

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(POINT_FIELDS)
    for point in points:
        known = ("" if value is None else value for value in (point.epoch, point.time))
        writer.writerow([point.name, point.step, *known, point.value])


def print_json(values: Record | Mapping[str, Any]) -> None:
    """Print what `--json` prints: one object, whose fields `engine/JSON.md` lists. Text is escaped to printable ASCII,
    and a number that is not finite is null."""
    from engine.base.codec import encode_indented

    typer.echo(encode_indented(_with_format(values)))


def print_points_json(name: str, points: Iterable[Point]) -> None:
    """Print the points of a run as an object of JSON, one after another: a million take as much memory as one."""
    from engine.base.codec import encode, encode_indented
    from engine.report.curve_points import point_rows

    head, _, tail = encode_indented(_with_format({"name": name, "points": []})).decode().rpartition("[]")
    sys.stdout.write(f"{head}[")
    for index, row in enumerate(point_rows(points)):
        sys.stdout.write(f"{',' if index else ''}\n    {encode(row).decode()}")
    typer.echo(f"\n  ]{tail}")


def json_line(values: Record | Mapping[str, Any]) -> str:
    """Return one line of a stream of JSON objects. Each line has the `format`, so a reader needs no other one."""
    from engine.base.codec import encode

    return encode(_with_format(values)).decode()


def _with_format(values: Record | Mapping[str, Any]) -> dict[str, Any]:
    from engine.base.codec import FORMAT, to_builtins

    return {"format": FORMAT, **(values if isinstance(values, Mapping) else to_builtins(values))}


@contextmanager
def until_unread() -> Iterator[None]:
    """End a stream of output without an error when its reader has closed the pipe, or at Ctrl-C."""
    try:
        yield
    except BrokenPipeError:
        # The flush at the exit of the interpreter would raise it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt:
        pass


def is_read_for(seconds: float) -> bool:
    """Wait for that time, and return whether somebody still reads stdout; not when its terminal or pipe has closed."""
    poll = select.poll()
    # Without events, poll(2) reports only that the other end is closed.
    poll.register(1, 0)
    return not poll.poll(1000 * seconds)


def table_console() -> Console:
    """Return a console for lines that fit it; without a terminal it is `COLUMNS` or 120 columns wide."""
    from rich.console import Console

    from tui.terminal.palette import ANSI, rich_theme

    width_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if width_known else NON_TTY_COLUMNS, theme=rich_theme(ANSI))


@contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """Print one line for each problem of a UsageError and exit with code 2."""

    try:
        yield
    except UsageError as error:
        for problem in error.problems:
            print_error(problem)
        raise typer.Exit(ExitCode.USAGE_ERROR) from error


def print_error(problem: Problem) -> None:
    """Print an error on stderr, escaped: it may contain the names of other users' runs and files."""

    typer.echo(f"error: {printable(str(problem))}", err=True)


def print_warning(problem: Problem) -> None:
    """Print a warning on stderr, escaped as an error."""

    typer.echo(f"warning: {printable(str(problem))}", err=True)


def is_interactive() -> bool:
    """Whether somebody can answer a question."""
    return sys.stdin.isatty()


def ask(question: str, lines: Sequence[str], command: str, *, yes: bool) -> None:
    """Ask on the terminal whether to go on; leave with exit code 1 if not. `lines` say what it is about.

    Raises UsageError without a terminal."""

    if yes:
        return
    if not is_interactive():
        raise UsageError.one(command, "asks a question, and there is no terminal; add --yes", code="no-terminal")
    more = len(lines) - MAX_ASKED_LINES
    for line in lines if more <= 0 else [*lines[:MAX_ASKED_LINES], f"and {more} more"]:
        typer.echo(f"  {line}", err=True)
    if not typer.confirm(f"{question}?", err=True):
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)


def show_progress(text: str) -> None:
    """Replace the last line of a terminal on stderr; "" clears it."""
    from tui.cli.terminal import moves_cursor

    if sys.stderr.isatty() and moves_cursor():
        typer.echo(f"\r\x1b[K{text}", err=True, nl=False)


@contextmanager
def reading_line(runs: Sequence[OpenedRun]) -> Iterator[Callable[[OpenedRun, float], None]]:
    """Yield what shows on a terminal how far the runs of other programs have been read, if that takes long."""
    from engine.report.table import shorten

    shown = time.monotonic() + PATIENCE_SECONDS - REFRESH_SECONDS

    def show(run: OpenedRun, share: float) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - shown >= REFRESH_SECONDS:
            shown = time.monotonic()
            number = f" {runs.index(run) + 1} of {len(runs)}" if len(runs) > 1 else ""
            line = f"Reading run{number}, {share:.0%}: {printable(run.name)}"
            show_progress(shorten(line, shutil.get_terminal_size().columns - 1))

    try:
        yield show
    finally:
        show_progress("")
