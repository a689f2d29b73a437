"""The tables of gputrain: one module a table with its columns and what is said around them.

A command prints `engine.report.table.plain_lines` (`tui.cli.console.print_table`), a screen draws the lines of a
`FittedTable` with `styled`, and the macro of the report's page takes `text_cells`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING

from rich.text import Span, Text

from engine.report.table import Column, Line, plain_lines

if TYPE_CHECKING:
    from rich.console import Console

FACT_COLUMNS: tuple[Column[tuple[str, str]], ...] = (
    Column("name", "", itemgetter(0)),
    Column("value", "", itemgetter(1)),
)


def styled(line: Line) -> Text:
    """Return a line of a table for a screen, which does not wrap it."""
    parts, end = [], 0
    for text, style in line:
        start, end = end, end + len(text)
        if style:
            parts.append(Span(start, end, style))
    # `Text.assemble` takes three times as long.
    return Text("".join(text for text, _ in line), spans=parts, no_wrap=True, end="")


def joined(lines: Iterable[Text]) -> Text:
    """Return lines of a table as one text."""
    return Text("\n", no_wrap=True, end="").join(lines)


def spans(text: Text) -> Line:
    """Return a styled text as a cell of a table. Parts without a style are dropped."""
    return tuple((text.plain[span.start : span.end], str(span.style)) for span in text.spans)


def fact_lines(facts: Mapping[str, object]) -> list[str]:
    """Return names and values as two columns without titles."""
    return plain_lines(FACT_COLUMNS, [(name, str(value)) for name, value in facts.items()])[1:]


def wrap_text(text: Text, width: int) -> list[Text]:
    """Wrap a styled text at words to lines of at most `width` columns; an empty text is one line."""
    return list(text.wrap(_plain_console(), max(width, 1), no_wrap=False)) or [Text("")]


@cache
def _plain_console() -> Console:
    """Return a console for `Text.wrap`, which takes no measure from it."""
    from rich.console import Console

    return Console(width=120)
