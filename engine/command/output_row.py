"""One line of output that may still change: a character and a style for each column."""

from __future__ import annotations

import re

from engine.utils.colors import encode_parts
from engine.utils.text import printable

MAX_COLUMNS = 8192  # of one line; further text is counted
MAX_STYLES = 4096  # of one program; further ones are the default style
_RUN = re.compile(r"(.)\1*", re.DOTALL)


class Styles:
    """The styles of a program, each by a character, so that those of a line are a text of the same length."""

    DEFAULT = "\0"

    def __init__(self) -> None:
        self._marks = {"": self.DEFAULT}
        self._names = [""]

    def mark(self, style: str) -> str:
        """Return the character of a style."""
        if style not in self._marks and len(self._names) < MAX_STYLES:
            self._marks[style] = chr(len(self._names))
            self._names.append(style)
        return self._marks.get(style, self.DEFAULT)

    def name(self, mark: str) -> str:
        """Return the style of a character."""
        return self._names[ord(mark)]


class OutputRow:
    """A row of the screen. Each character takes one column."""

    __slots__ = ("_columns", "_marks", "_text", "changed_at")

    def __init__(self, changed_at: float) -> None:
        self.changed_at = changed_at
        self._text = self._marks = ""
        self._columns = 0
        """Length of the line, with what is beyond `MAX_COLUMNS`."""

    def write(self, column: int, text: str, mark: str) -> None:
        """Write text over others."""
        end = column + len(text)
        if column == self._columns and end <= MAX_COLUMNS:
            # Most lines are only appended to.
            self._text += text
            self._marks += mark * len(text)
            self._columns = end
            return
        self._columns = max(self._columns, end)
        if column < MAX_COLUMNS:
            text = text[: MAX_COLUMNS - column]
            self._text = self._text[:column].ljust(column) + text + self._text[end:]
            self._marks = self._marks[:column].ljust(column, Styles.DEFAULT) + mark * len(text) + self._marks[end:]

    def erase(self, start: int, end: int | None = None) -> None:
        """Erase columns from `start` to before `end`; without `end`, the rest of the line."""
        if end is not None and end < self._columns:
            self.write(start, " " * (end - start), Styles.DEFAULT)
        elif start < self._columns:
            self._text, self._marks, self._columns = self._text[:start], self._marks[:start], start

    def render(self, styles: Styles) -> str:
        """Return the line without trailing blanks, printable, with SGR sequences."""
        text = self._text.rstrip(" ")
        if self._marks.strip(Styles.DEFAULT):
            runs = _RUN.finditer(self._marks, 0, len(text))
            text = encode_parts((printable(text[run.start() : run.end()]), styles.name(run[1])) for run in runs)
        else:
            text = printable(text)
        omitted = self._columns - MAX_COLUMNS
        return f"{text} [{omitted} more characters]" if omitted > 0 else text
