"""Tables: columns over rows, fitted to a width, as lines of styled text, as plain text or as cells of text.

`tui.screens.tables` has the columns of each table; a screen draws `FittedTable.line`, a command prints `plain_lines`,
and the macro of the report's page takes `text_cells`. All text is escaped here, so that no name can control a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

from wcwidth import wcswidth

from engine.base.text import printable

Row = TypeVar("Row")
Span = tuple[str, str]
"""A text and the name of its style, "" for none."""
Line = tuple[Span, ...]
"""Spans side by side."""
Cell = str | Line
GAP = "  "
NO_LIMIT = 1 << 30
"""Width at which every cell is shown in full."""


class Align(Enum):
    """Side of a column at which its cells begin."""

    LEFT = "left"
    RIGHT = "right"


class Shorten(Enum):
    """What a cell that is too long loses."""

    END = "end"
    MIDDLE = "middle"
    """The beginning and the end stay: the end tells similar names apart."""


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column: how a row fills it, and how it takes part in fitting.

    It is as wide as its title and its cells, at least `width` and at most `max_width` cells (0 for no limit).
    Columns of the lowest `priority` are dropped first, of equal ones the rightmost. A `flex` column narrows down to
    `width` before a column is dropped. An `optional` column is dropped if all its cells are empty.
    """

    key: str
    title: str
    cell: Callable[[Row], Cell]
    align: Align = Align.LEFT
    width: int = 0
    max_width: int = 0
    priority: int = 0
    flex: bool = False
    optional: bool = False
    style: str | Callable[[Row], str] = ""
    shorten: Shorten = Shorten.END

    def spans(self, row: Row) -> Line:
        """Return the cell of a row as spans of printable text."""
        return _spans(self.cell(row), self.style if isinstance(self.style, str) else self.style(row))


@dataclass(frozen=True)
class FittedTable(Generic[Row]):
    """Columns with their widths. No line is wider than `width` cells."""

    columns: tuple[Column[Row], ...]
    widths: tuple[int, ...]
    width: int
    gap: str = GAP

    def header(self, style: str = "") -> Line:
        """Return the line of the titles."""
        return self._joined([_spans(column.title, style) for column in self.columns])

    def line(self, row: Row, rest: tuple[str, Cell] | None = None) -> Line:
        """Return the line of a row. `rest` is the key of a column and what takes its place and that of all after it."""
        keys = [column.key for column in self.columns]
        if rest is None or rest[0] not in keys:
            return self._joined([column.spans(row) for column in self.columns])
        first = keys.index(rest[0])
        line = self._joined([column.spans(row) for column in self.columns[:first]], pad_last=True)
        return shorten_line((*line, *(((self.gap, ""),) if line else ()), *_spans(rest[1])), self.width)

    def _joined(self, cells: Sequence[Line], *, pad_last: bool = False) -> Line:
        spans: list[Span] = []
        for index, (cell, column, width) in enumerate(zip(cells, self.columns, self.widths, strict=False)):
            if index:
                spans.append((self.gap, ""))
            is_last = index == len(self.columns) - 1 and not pad_last
            spans += _padded(cell, column, width, pad_end=not is_last)
        return shorten_line(tuple(spans), self.width)


def fit(
    columns: Iterable[Column[Row]],
    rows: Sequence[Row],
    width: int,
    titles: Callable[[Column[Row]], str] = lambda column: column.title,
    gap: str = GAP,
) -> FittedTable[Row]:
    """Return the table for lines of at most `width` cells. `rows` are those whose cells are measured."""
    shown = [column for column in columns if not column.optional or any(line_text(column.spans(row)) for row in rows)]
    natural = {column.key: _natural_width(column, rows, titles(column)) for column in shown}
    least = {
        column.key: min(natural[column.key], max(column.width, 1)) if column.flex else natural[column.key]
        for column in shown
    }
    while len(shown) > 1 and sum(least[column.key] for column in shown) + len(gap) * (len(shown) - 1) > width:
        lowest = min(column.priority for column in shown)
        shown.pop(max(index for index, column in enumerate(shown) if column.priority == lowest))
    room = width - len(gap) * (len(shown) - 1) - sum(least[column.key] for column in shown)
    widths = []
    for column in shown:
        growth = min(natural[column.key] - least[column.key], max(room, 0))
        room -= growth
        widths.append(max(min(least[column.key] + growth, width), 0))
    return FittedTable(tuple(shown), tuple(widths), width, gap)


def _natural_width(column: Column[Row], rows: Sequence[Row], title: str) -> int:
    widest = max((line_width(column.spans(row)) for row in rows), default=0)
    widest = min(widest, column.max_width) if column.max_width else widest
    return max(widest, column.width, cell_width(printable(title)))


def text_cells(columns: Iterable[Column[Row]], row: Row) -> tuple[str, ...]:
    """Return the cells of a row as text, for a page."""
    return tuple(line_text(column.spans(row)) for column in columns)


def plain_lines(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> list[str]:
    """Return the titles and the rows as text, with every cell in full."""
    table = fit([replace(column, max_width=0) for column in columns], rows, NO_LIMIT)
    return [line_text(line) for line in (table.header(), *(table.line(row) for row in rows))]


def cell_width(text: str) -> int:
    """Return the width of a printable text in columns of a terminal: a Chinese character has two."""
    return len(text) if text.isascii() else max(wcswidth(text), 0)


def line_width(line: Line) -> int:
    """Return the width of a line in columns of a terminal."""
    # No call for each span: the monitor measures hundreds per refresh.
    return sum([len(text) if text.isascii() else max(wcswidth(text), 0) for text, _ in line])


def line_text(line: Line) -> str:
    """Return a line without its styles and without blanks at its end."""
    return "".join(text for text, _ in line).rstrip()


def shorten(text: str, width: int, mode: Shorten = Shorten.END) -> str:
    """Shorten a text to at most `width` cells, with an ellipsis in place of what is cut."""
    if cell_width(text) <= width:
        return text
    if width <= 0:
        return ""
    tail = _end(text, (width - 1) * 2 // 3) if mode is Shorten.MIDDLE else ""
    return _beginning(text, width - 1 - cell_width(tail)) + "…" + tail


def shorten_line(line: Line, width: int) -> Line:
    """Cut a line to at most `width` cells, with an ellipsis at its end."""
    if line_width(line) <= width:
        return line
    spans: list[Span] = []
    room = width
    for text, style in line:
        if cell_width(text) >= room:
            spans.append((shorten(text + "…", room), style))
            break
        spans.append((text, style))
        room -= cell_width(text)
    return tuple(spans)


def pad(text: str, width: int, align: Align = Align.LEFT, mode: Shorten = Shorten.END) -> str:
    """Shorten or pad a text to exactly `width` cells."""
    text = shorten(text, width, mode)
    blanks = " " * (width - cell_width(text))
    return blanks + text if align is Align.RIGHT else text + blanks


def _spans(cell: Cell, style: str = "") -> Line:
    """Return a cell as spans of printable text; a text without spans has this style."""
    return tuple((printable(text), own) for text, own in (((cell, style),) if isinstance(cell, str) else cell))


def _padded(cell: Line, column: Column[Row], width: int, *, pad_end: bool) -> Line:
    if cell and column.shorten is Shorten.MIDDLE:
        *before, (text, style) = cell
        cell = (*before, (shorten(text, max(width - line_width(tuple(before)), 0), Shorten.MIDDLE), style))
    cell = shorten_line(cell, width)
    blanks = ((" " * (width - line_width(cell)), ""),)
    if column.align is Align.RIGHT:
        return (*blanks, *cell)
    return (*cell, *blanks) if pad_end else cell


def _beginning(text: str, width: int) -> str:
    end = min(len(text), width)
    while cell_width(text[:end]) > width:
        end -= 1
    return text[:end]


def _end(text: str, width: int) -> str:
    start = max(len(text) - width, 0)
    while cell_width(text[start:]) > width:
        start += 1
    return text[start:]
