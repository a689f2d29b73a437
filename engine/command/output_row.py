"""One line of output that may still change: a character and a style for each column."""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter

from engine.utils.colors import encode_parts
from engine.utils.text import printable

MAX_COLUMNS = 8192  # of one line; further text is counted
MAX_COMBINED = 8  # characters in one column: a letter and its accents
# Characters that take one column each, among them those of progress bars and frames. Others are measured.
_ODD_WIDTH = re.compile(
    r"[^\n -~\xa0-\xac\xae-\u02ff\u0370-\u0377\u0384-\u0482\u2010-\u2027\u2030-\u203a\u2190-\u21ff\u2500-\u259f"
    r"\u2800-\u28ff\ufffd]"
)


def has_odd_width(text: str) -> bool:
    """Whether a character may take no column or two. Newlines do not count."""
    return not text.isascii() and _ODD_WIDTH.search(text) is not None


def split_cells(text: str) -> tuple[str, list[str]]:
    """Return the text by columns, after the combining characters at its beginning, which belong to the column before
    it. A wide character is followed by an empty column. Invisible characters, such as those that change the direction
    of text, are dropped."""
    # Takes 50 ms to import, and few programs print such characters.
    from wcwidth import wcwidth

    before = ""
    cells: list[str] = []
    for character in text:
        width = wcwidth(character)
        if width == 0:
            if character.isprintable() and cells:
                _combine(cells, len(cells), character)
            elif character.isprintable():
                before += character
        else:
            cells.append(character)
            if width == 2:
                cells.append("")
    return before, cells


def _combine(cells: list[str], column: int, characters: str) -> None:
    """Add combining characters to the column before this one."""
    place = column - 1 if column < 2 or cells[column - 1] else column - 2
    cells[place] = (cells[place] + characters)[:MAX_COMBINED]


def render_line(text: str, style: str) -> str:
    """Return what `OutputRow.render` returns for a line of one style."""
    if not style and len(text) <= MAX_COLUMNS:
        return printable(text.rstrip(" "))
    row = OutputRow(0.0)
    row.write(0, text, style)
    return row.render()


class OutputRow:
    """A row of the screen. One that is only appended to, or replaced as a whole, stays a list of parts: cells take 20
    times as long."""

    __slots__ = ("_cells", "_columns", "_parts", "_styles", "changed_at")

    def __init__(self, changed_at: float) -> None:
        self.changed_at = changed_at
        self._parts: list[tuple[str, str]] = []
        """Text and its style, one column a character."""
        self._cells: list[str] | None = None
        """Instead of the parts, if it is not None."""
        self._styles: list[str] = []
        self._columns = 0
        """Length of the line, with what is beyond `MAX_COLUMNS`."""

    def write(self, column: int, text: str, style: str) -> None:
        """Write text of one column a character."""
        end = column + len(text)
        if column == 0 and end >= self._columns:
            self._parts, self._cells, self._columns = [(text[:MAX_COLUMNS], style)], None, end
        elif self._cells is None and column == self._columns:
            if column < MAX_COLUMNS:
                self._append(text[: MAX_COLUMNS - column], style)
            self._columns = end
        else:
            self.write_cells(column, list(text), style)

    def _append(self, text: str, style: str) -> None:
        if self._parts and self._parts[-1][1] == style:
            text = self._parts.pop()[0] + text
        self._parts.append((text, style))

    def write_cells(self, column: int, cells: list[str], style: str) -> None:
        """Write columns over others."""
        end = column + len(cells)
        self._columns = max(self._columns, end)
        if column >= MAX_COLUMNS:
            return
        own, styles = self._edit()
        if (gap := column - len(own)) > 0:
            own += " " * gap
            styles += [""] * gap
        # A wide character that loses one of its columns vanishes.
        if 0 < column < len(own) and not own[column]:
            own[column - 1] = " "
        if end < len(own) and not own[end]:
            own[end] = " "
        cells = cells[: MAX_COLUMNS - column]
        own[column:end] = cells
        styles[column:end] = [style] * len(cells)

    def combine(self, column: int, characters: str) -> None:
        """Add combining characters to the column before this one."""
        if 0 < column <= min(self._columns, MAX_COLUMNS):
            _combine(self._edit()[0], column, characters)

    def erase(self, start: int, end: int | None) -> None:
        """Erase columns from `start` to before `end`; without `end`, the rest of the line."""
        if end is not None and end < self._columns:
            self.write_cells(start, [" "] * (end - start), "")
        elif start == 0:
            self._parts, self._cells, self._columns = [], None, 0
        elif start < self._columns:
            cells, styles = self._edit()
            if start < len(cells) and not cells[start]:
                cells[start - 1] = " "
            del cells[start:], styles[start:]
            self._columns = start

    def render(self) -> str:
        """Return the line without trailing blanks, printable, with SGR sequences."""
        parts = self._parts
        if self._cells is not None:
            runs = groupby(zip(self._cells, self._styles, strict=True), itemgetter(1))
            parts = [("".join(cell for cell, _ in run), style) for style, run in runs]
        last = len(parts)
        while last and not (end := parts[last - 1][0].rstrip(" ")):
            last -= 1
        if not last:
            return ""
        parts = [*parts[: last - 1], (end, parts[last - 1][1])]
        line = encode_parts((printable(text), style) for text, style in parts)
        omitted = self._columns - MAX_COLUMNS
        return f"{line} [{omitted} more characters]" if omitted > 0 else line

    def _edit(self) -> tuple[list[str], list[str]]:
        """Return characters and styles of the columns, to be changed in place."""
        if self._cells is None:
            self._cells = [character for text, _ in self._parts for character in text]
            self._styles = [style for text, style in self._parts for _ in text]
            self._parts = []
        return self._cells, self._styles
