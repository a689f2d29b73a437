"""Prints tables, and lines of styled text as wide as the terminal, to stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from engine.show.table import Column, Row, plain_lines

if TYPE_CHECKING:
    from rich.console import Console

NON_TTY_COLUMNS = 120


def print_table(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> None:
    """Print the titles and all cells of a table in full."""
    for line in plain_lines(columns, rows):
        typer.echo(line)


def table_console() -> Console:
    """Return a console for lines that fit it; without a terminal it is `COLUMNS` or 120 columns wide."""
    from rich.console import Console

    from tui.palette import ANSI, rich_theme

    width_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if width_known else NON_TTY_COLUMNS, theme=rich_theme(ANSI))
