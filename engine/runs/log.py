"""Write `log.txt` of a run, and read it for a terminal: text without control characters, in bounded memory.

`engine.runs.recorder` writes it, `gputrain logs` reads it. Ranks, and other users who can write to the run folder, put
arbitrary bytes into the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from engine.utils.errors import Problem
from engine.utils.files import append_to_file, open_regular_file
from engine.utils.text import printable

# Longer lines are read in parts.
MAX_PART_BYTES = 1 << 16
MAX_UNWRITTEN_BYTES = 1 << 20


class LogWriter:
    """Appends text to a log. What cannot be written waits in memory."""

    def __init__(self, path: Path) -> None:
        """Never raises OSError: a log that cannot be written must not keep a run from starting."""
        self._path = path
        self._unwritten = b""
        self._fd: int | None = None
        with suppress(OSError):
            self._fd = append_to_file(path)

    def add(self, text: str) -> None:
        """Add text for the next `flush`. More than `MAX_UNWRITTEN_BYTES` are not kept."""
        if text and len(self._unwritten) < MAX_UNWRITTEN_BYTES:
            self._unwritten += text.encode(errors="backslashreplace")

    def flush(self) -> Problem | None:
        """Write the text. Return a warning if the log was deleted, which begins a new one. Raises OSError."""
        if not self._unwritten:
            return None
        warning = None
        if self._fd is not None and os.fstat(self._fd).st_nlink == 0:
            self.close()
            reason = f"{self._path.name} was deleted; a new one begins here, without what the ranks print"
            warning = Problem("", reason, code="recovered")
        if self._fd is None:
            self._fd = append_to_file(self._path)
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
        return warning

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LogReader:
    """Reads a log that may grow, be truncated or be replaced."""

    def __init__(self, path: Path) -> None:
        """Open the log. Raises OSError if it is missing or not a regular file."""
        self._path = path
        self._file: BinaryIO = open_regular_file(path)
        self._rest = ""

    def skip_to_last(self, count: int) -> None:
        """Let the next `read` begin with the last lines as it returns them; the last one may lack its end."""
        start = self._find_lines(count)
        self._file.seek(start)
        # A carriage return also ends a line, so these can be more.
        skipped, end = -count, "\n"
        for end in self._parts():
            skipped += end.count("\n")
        skipped += not end.endswith("\n")
        self._file.seek(start)
        for part in self._parts() if skipped > 0 else ():
            lines = part.splitlines(keepends=True)
            if len(lines) > skipped:
                self._rest = "".join(lines[skipped:])
                return
            skipped -= part.count("\n")

    def _find_lines(self, count: int) -> int:
        """Return where the last lines begin that newlines end."""
        position = self._file.seek(0, os.SEEK_END)
        is_last = True
        while position > 0:
            size = min(position, MAX_PART_BYTES)
            position = self._file.seek(position - size)
            block = self._file.read(size)
            count += is_last and block.endswith(b"\n")
            is_last = False
            newlines = block.count(b"\n")
            if newlines < count:
                count -= newlines
                continue
            index = len(block)
            for _ in range(count):
                index = block.rindex(b"\n", 0, index)
            return position + index + 1
        return 0

    def read(self) -> Iterator[str]:
        """Yield the text that was added since the last call, at most a line at a time. Starts again at the beginning of
        a log that was truncated or replaced by another regular file.

        Control characters are escaped except tabs. A line ends with a newline, also if it ended with a carriage return.
        """
        rest, self._rest = self._rest, ""
        if rest:
            yield rest
        while True:
            yield from self._parts()
            if not self._reopen():
                return

    def _parts(self) -> Iterator[str]:
        while part := self._file.readline(MAX_PART_BYTES):
            yield _escape(part.decode(errors="replace"))

    def _reopen(self) -> bool:
        """Open the log again if this is no longer the file at its path, or if it became shorter."""
        try:
            named = self._path.lstat()
            is_same = os.path.samestat(os.fstat(self._file.fileno()), named)
            if is_same and named.st_size >= self._file.tell():
                return False
            reopened = open_regular_file(self._path)
        except OSError:
            return False
        self._file.close()
        self._file = reopened
        return True


def _escape(text: str) -> str:
    lines = []
    for line in text.splitlines(keepends=True):
        content = line.splitlines()[0]
        lines.append("\t".join(map(printable, content.split("\t"))) + ("\n" if content != line else ""))
    return "".join(lines)
