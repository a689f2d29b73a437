"""Fold the output of a command, which was written for a terminal, into final lines of text with colors.

Progress bars return to the beginning of their line (tqdm, Keras), or move the cursor up to lines that they have written
(several bars of tqdm, live displays of Rich). `OutputLog` is the screen of a terminal that is as high as that of
`engine.jobs.command.terminal`, with lines of any width: a program sees 132 columns, but wrapped lines would be cut in
the log. A line is final when nothing can change it: it has left the top of the screen, or it was left unchanged for a
while and is not part of a live display. Control sequences: ECMA-48 and
https://invisible-island.net/xterm/ctlseqs/ctlseqs.html.

pyte, a terminal emulator, takes more than 100 times as long, and knows neither lines of any width nor lines that are
final.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable

from engine.base.colors import MAX_PARAMETERS, change_style, encode_parts
from engine.base.text import printable

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


ROWS, COLUMNS = 48, 132
"""Size of the terminal."""
SETTLE_SECONDS = 0.5  # a program that draws several lines moves back to the first one sooner
LIVE_SECONDS = 10.0  # a display without a change for so long has ended, unless it still hides the cursor
TAB_COLUMNS = 8

# A string, such as a title, ends at BEL, CAN, SUB, ESC or a newline: the end of a broken one would never come. Those
# characters are tokens of their own that do nothing.
_STRING_REST = re.compile(r"[^\x07\x18\x1a\x1b\n]*")
_CSI = rf"\x1b\[([0-?]{{0,{MAX_PARAMETERS}}})([ -/]{{0,8}})"
_TOKEN = re.compile(
    r"([^\x00-\x1f\x7f-\x9f]+)"  # 1: text
    r"|([\x00-\x1a\x1c-\x1f\x7f-\x9f])"  # 2: control character
    rf"|{_CSI}([@-~]?)"  # 3, 4, 5: control sequence
    rf"|(\x1b[\]PX^_]{_STRING_REST.pattern})"  # 6: string
    r"|\x1b([ -/]{0,8}[0-~]?)"  # 7: other escape sequence, which does nothing
)
_INCOMPLETE = re.compile(rf"{_CSI}|\x1b[ -/]{{0,8}}")
_ALTERNATE_SCREENS = {"?47", "?1047", "?1049"}


class OutputLog:
    """Bytes of a terminal in, final lines out: printable text and SGR sequences, see `engine.base.colors`.

    The memory is bounded: `ROWS` lines of `MAX_COLUMNS` characters may wait.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._clock, self._now = clock, clock()
        self._rest = ""
        """Beginning of an escape sequence whose end has not been read."""
        self._in_string = False
        self._style = ""
        self._styles, self._mark = Styles(), Styles.DEFAULT
        self._is_alternate = False
        """Whether a full-screen program draws on the alternate screen."""
        self._final: list[str] = []
        self._moved_up_at = 0.0
        self._cursor_hidden = False
        self._clear_screen()

    def feed(self, data: bytes = b"") -> list[str]:
        """Return the lines that became final. Without data, those that were left unchanged long enough."""
        self._now = self._clock()
        self._interpret(self._decoder.decode(data))
        self._settle()
        final, self._final = self._final, []
        return final

    def pending(self) -> list[str]:
        """Return the lines that may still change, such as a progress bar."""
        return self._rendered(0)

    def close(self) -> list[str]:
        """Return the remaining lines, without blank ones that an erased display left behind."""
        self._interpret(self._decoder.decode(b"", final=True))
        self._finish_screen()
        final, self._final = self._final, []
        return final

    def _rendered(self, min_count: int) -> list[str]:
        """Return the rows without blank ones at the end, but at least `min_count`."""
        lines = [row.render(self._styles) for row in self._rows]
        while len(lines) > min_count and not lines[-1]:
            lines.pop()
        return lines

    def _finish_screen(self) -> None:
        self._final += self._rendered(self._row)
        self._clear_screen()

    def _clear_screen(self) -> None:
        self._rows = [OutputRow(self._now)]
        self._row = self._column = 0
        self._reach = 0
        """How many rows above the last one a live display has moved up."""

    def _interpret(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        start = 0
        if self._in_string:
            match = _STRING_REST.match(text)
            start = match.end() if match else 0
            self._in_string = start == len(text)
        escape = text.rfind("\x1b", start)
        if escape >= 0 and _INCOMPLETE.fullmatch(text, escape):
            text, self._rest = text[:escape], text[escape:]
        for token in _TOKEN.finditer(text, start):
            kind = token.lastindex
            if kind == 1:
                self._write(token[0])
            elif kind == 2:
                self._control(token[0])
            elif kind == 5 and token[5] and not token[4]:
                self._sequence(token[5], token[3])
            elif kind == 6:
                self._in_string = token.end() == len(text)

    def _write(self, text: str) -> None:
        row = self._rows[self._row]
        row.changed_at = self._now
        row.write(self._column, text, self._mark)
        self._column += len(text)

    def _control(self, character: str) -> None:
        if character in "\n\v\f":
            # To the beginning of the next row, as a terminal does that translates newlines.
            self._column = 0
            self._row += 1
            if self._row == len(self._rows):
                self._rows.append(OutputRow(self._now))
                self._finish_top(len(self._rows) - ROWS)
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(self._column - 1, 0)
        elif character == "\t":
            self._column += TAB_COLUMNS - self._column % TAB_COLUMNS

    def _finish_top(self, count: int) -> None:
        """Finish the first rows. Nothing happens if the count is not positive."""
        if count > 0:
            self._final += [row.render(self._styles) for row in self._rows[:count]]
            del self._rows[:count]
            self._row -= count

    def _settle(self) -> None:
        """Finish the rows above the cursor that are not part of a live display and were left unchanged."""
        if self._is_alternate:
            return
        if not self._cursor_hidden and self._now - self._moved_up_at > LIVE_SECONDS:
            self._reach = 0
        last = min(self._row, len(self._rows) - 1 - self._reach)
        is_fresh = (self._now - row.changed_at < SETTLE_SECONDS for row in self._rows[: max(last, 0)])
        self._finish_top(next((count for count, fresh in enumerate(is_fresh) if fresh), last))

    def _move(self, row: int, column: int) -> None:
        """Move the cursor within the screen; rows that do not exist are blank."""
        row = min(max(row, 0), ROWS - 1)
        while len(self._rows) <= row:
            self._rows.append(OutputRow(self._now))
        if row < self._row:
            self._reach = max(self._reach, len(self._rows) - 1 - row)
            self._moved_up_at = self._now
        self._row, self._column = row, max(column, 0)

    def _sequence(self, final: str, parameters: str) -> None:
        if final == "m":
            if not parameters.strip("0123456789;:"):
                self._style = change_style(self._style, parameters)
                self._mark = self._styles.mark(self._style)
            return
        if final in "hl" and parameters[:1] == "?":
            for mode in parameters[1:].split(";"):
                self._set_mode(f"?{mode}", on=final == "h")
        first, _, second = parameters.partition(";")
        number = int(first) if first.isdecimal() else 0
        count = min(max(number, 1), MAX_COLUMNS)
        # A program that moves to the right edge asks for column 999. Text may be beyond the edge.
        edge = max(self._column, COLUMNS - 1)
        if final in "ABEF":
            self._move(self._row + (count if final in "BE" else -count), self._column if final in "AB" else 0)
        elif final in "CD":
            self._column = max(min(self._column + (count if final == "C" else -count), edge), 0)
        elif final == "G":
            self._column = min(count - 1, edge)
        elif final in "Hf":
            column = int(second) if second.isdecimal() else 1
            self._move(count - 1, min(column, COLUMNS) - 1)
        elif final == "J":
            self._erase_display(number)
        elif final == "K":
            self._erase_line(number)

    def _set_mode(self, mode: str, *, on: bool) -> None:
        if mode == "?25":
            self._cursor_hidden = not on
        elif mode in _ALTERNATE_SCREENS and on != self._is_alternate:
            # What a full-screen program draws is not part of the log, unless it leaves the top of its screen or remains
            # at the end: after a crash, the output of other programs is there.
            if on:
                self._finish_screen()
            else:
                self._clear_screen()
            self._is_alternate = on

    def _erase_line(self, part: int) -> None:
        start = 0 if part in (1, 2) else self._column
        self._rows[self._row].erase(start, self._column + 1 if part == 1 else None)

    def _erase_display(self, part: int) -> None:
        """Erase below (0), above (1) or all (2); 3 erases what has left the screen, which the log keeps."""
        if part in (0, 2):
            del self._rows[self._row + 1 :]
        if part in (1, 2):
            for row in self._rows[: self._row]:
                row.erase(0)
        if part < 3:
            self._erase_line(part)
