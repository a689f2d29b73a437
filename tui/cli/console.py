"""Prints tables, lines of styled text as wide as the terminal, errors and warnings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from engine.utils.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from engine.show.table import Column, Row
    from engine.utils.errors import Problem

NON_TTY_COLUMNS = 120


def print_table(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> None:
    """Print the titles and all cells of a table in full."""
    from engine.show.table import plain_lines

    for line in plain_lines(columns, rows):
        typer.echo(line)


def table_console() -> Console:
    """Return a console for lines that fit it; without a terminal it is `COLUMNS` or 120 columns wide."""
    from rich.console import Console

    from tui.palette import ANSI, rich_theme

    width_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if width_known else NON_TTY_COLUMNS, theme=rich_theme(ANSI))


@contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """Print one line for each problem of a UsageError and exit with code 2."""
    from engine.utils.errors import UsageError

    try:
        yield
    except UsageError as error:
        for problem in error.problems:
            print_error(problem)
        raise typer.Exit(ExitCode.USAGE_ERROR) from error


def print_error(problem: Problem) -> None:
    """Print an error on stderr, escaped: it may contain the names of other users' runs and files."""
    from engine.utils.text import printable

    typer.echo(f"error: {printable(str(problem))}", err=True)


def print_warning(problem: Problem) -> None:
    """Print a warning on stderr, escaped as an error."""
    from engine.utils.text import printable

    typer.echo(f"warning: {printable(str(problem))}", err=True)
