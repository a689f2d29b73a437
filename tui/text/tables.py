"""Shared parts of the text tables: column alignment, console width, the placeholder for unknown values."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from rich.text import Text

from engine.utils.text import printable

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN = "–"
"""Placeholder for an unknown value."""
NON_TTY_COLUMNS = 120
COLUMN_GAP = "  "


def table_console() -> Console:
    """Return a console for tables; without a terminal it is `COLUMNS` or 120 columns wide."""
    from rich.console import Console

    from tui.palette import ANSI, rich_theme

    width_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if width_known else NON_TTY_COLUMNS, theme=rich_theme(ANSI))


def wrap_text(text: Text, width: int) -> list[Text]:
    """Wrap a styled text at words to lines of at most `width` columns; an empty text is one line."""
    return list(text.wrap(_plain_console(), max(width, 1))) or [Text("")]


@cache
def _plain_console() -> Console:
    """Return a console for `Text.wrap`, which takes no measure from it."""
    from rich.console import Console

    return Console(width=NON_TTY_COLUMNS)


def shorten_middle(text: str, width: int) -> str:
    """Shorten to at most `width` cells. The beginning and the end stay: the end tells similar names apart."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    tail_columns = max(width - 1, 0) * 2 // 3
    tail = ""
    for character in reversed(text):
        if cell_len(character + tail) > tail_columns:
            break
        tail = character + tail
    return set_cell_size(text, max(width - 1 - cell_len(tail), 0)) + "…" + tail if width > 0 else ""


def format_table(rows: Sequence[Sequence[str]], right_aligned: Sequence[int]) -> Iterator[str]:
    """Yield the rows as aligned lines; `right_aligned` holds column indices."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_width, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        blanks = [" " * (width - cell_width(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            blank + cell if column in right_aligned else cell + blank
            for column, (cell, blank) in enumerate(zip(row, blanks, strict=True))
        ]
        yield COLUMN_GAP.join(cells).rstrip()


def cell_width(text: str) -> int:
    """Return the width of a text in columns of a terminal: a Chinese character has two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
