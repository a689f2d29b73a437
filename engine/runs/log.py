"""Write `log.txt` of a run, and read it for a terminal: text without control characters, in bounded memory.

`engine.runs.recorder` writes it, `gputrain logs` reads it. Ranks, and other users who can write to the run folder, put
arbitrary bytes into the log.

A log with a limit has up to three files. The first full one is kept as `log.beginning.txt`, which shows how the run
started; the last full one is `log.previous.txt`; `log.txt` grows, so whatever follows or reads the end of a log needs
no other file. A file that grows is never rewritten. What may still change, such as a progress bar, is in
`log.pending.txt` meanwhile.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from engine.base.colors import with_colors, without_colors
from engine.base.files import append_to_file, file_size, open_regular_file, overwrite_bytes, read_bytes, replace_file
from engine.base.units import format_bytes

# Longer lines are read in parts.
MAX_PART_BYTES = 1 << 16
MAX_LAST_BYTES = 1 << 26
MAX_UNWRITTEN_BYTES = 1 << 20
MAX_PENDING_LENGTH = 1024  # characters of a line; a screen shows less
MAX_PENDING_BYTES = 1 << 20
MAX_COMMAND_LOG_BYTES = 1 << 23  # of each file: about 100,000 lines


def log_files(log: Path) -> tuple[Path, Path, Path]:
    """Return the paths of a log's files, the oldest first. Only the last one, `log` itself, exists without a limit."""
    return log.with_suffix(f".beginning{log.suffix}"), log.with_suffix(f".previous{log.suffix}"), log


def pending_file(log: Path) -> Path:
    """Return the path of the lines below a log that may still change."""
    return log.with_suffix(f".pending{log.suffix}")


class LogWriter:
    """Appends text to a log. What cannot be written waits in memory."""

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        """With `max_bytes`, the log is that of a command: it has up to three files of about that size, and only this
        user can read it, because programs print secrets.

        Never raises OSError: a log that cannot be written must not keep a run from starting.
        """
        self._path, self._max_bytes = path, max_bytes
        self._mode = 0o644 if max_bytes is None else 0o600
        self._lost_bytes = 0
        self._unwritten = b""
        self._fd: int | None = None
        with suppress(OSError):
            self._fd = append_to_file(path, self._mode)

    def add(self, text: str) -> None:
        """Add text for the next `flush`. More than `MAX_UNWRITTEN_BYTES` are not kept."""
        if text and len(self._unwritten) < MAX_UNWRITTEN_BYTES:
            self._unwritten += text.encode(errors="backslashreplace")

    def flush(self) -> None:
        """Write the text. Raises OSError."""
        if not self._unwritten:
            return
        if self._fd is None:
            self._fd = append_to_file(self._path, self._mode)
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
        if self._max_bytes is not None and os.fstat(self._fd).st_size >= self._max_bytes:
            self._begin_file()

    def _begin_file(self) -> None:
        """Continue in a new file, whose first line says how much is lost."""
        beginning, previous, log = log_files(self._path)
        full = previous if os.path.lexists(beginning) else beginning
        # The user may have let others read it.
        self._mode = stat.S_IMODE(log.stat().st_mode)
        lost_bytes = file_size(full)
        log.rename(full)
        self.close()
        self._fd = append_to_file(log, self._mode)
        self._lost_bytes += lost_bytes
        if self._lost_bytes:
            lost = f"{format_bytes(self._lost_bytes)} of output after {beginning.name} are not kept"
            os.write(self._fd, f"[{lost}; {previous.name} and this file follow]\n".encode())

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class PendingLines:
    """The lines below the log that may still change, such as progress bars: `log.pending.txt`, for screens."""

    def __init__(self, log: Path) -> None:
        self._path = pending_file(log)
        self._written: bytes | None = None

    def write(self, lines: Sequence[str]) -> None:
        """Write other lines. Never raises OSError: the next call has newer ones."""
        text = "".join(f"{line[:MAX_PENDING_LENGTH]}\n" for line in lines).encode(errors="backslashreplace")
        if text == self._written:
            return
        is_first, self._written = self._written is None, None
        with suppress(OSError):
            if is_first:
                # That of an earlier start, or a planted link.
                self._path.unlink(missing_ok=True)
            try:
                # To replace the file takes five times as long, and programs print line after line.
                overwrite_bytes(self._path, text)
            except FileNotFoundError:
                if text:
                    replace_file(self._path, lambda file: file.write(text), private=True)
            self._written = text

    def close(self) -> None:
        """Remove the file."""
        self._written = None
        self.write(())


def read_pending(log: Path) -> list[str]:
    """Return the lines below a log that may still change. Raises OSError."""
    try:
        data = read_bytes(pending_file(log), MAX_PENDING_BYTES)
        # Blanks take the place of a longer text, see `overwrite_bytes`.
        return data[: data.rfind(b"\n") + 1].decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


class LogReader:
    """Reads a log that may grow, be truncated or be replaced."""

    def __init__(self, path: Path, *, colors: bool = False) -> None:
        """Open the log; with `colors`, SGR sequences are kept. Raises OSError if it is missing or not a regular
        file."""
        self._path, self._clean = path, with_colors if colors else without_colors
        self._file: BinaryIO = open_regular_file(path)
        self._rest = ""

    def skip_to_last(self, count: int) -> int:
        """Let the next `read` begin with the last lines as it returns them; the last one may lack its end. Return how
        many there are, at most `count`, and those in the last `MAX_LAST_BYTES`."""
        size, start, span, lines = self._file.seek(0, os.SEEK_END), math.inf, MAX_PART_BYTES, list[str]()
        # The first line that is read may lack its beginning.
        while len(lines) <= count and start > 0 and span <= MAX_LAST_BYTES:
            start = self._file.seek(max(size - span, 0))
            lines = "".join(self._parts()).splitlines(keepends=True)
            span *= 4
        self._rest = "".join(lines[-count:])
        return min(len(lines), count)

    def read(self) -> Iterator[str]:
        """Yield the text that was added since the last call, at most a line at a time. Starts again at the beginning of
        a log that was truncated or replaced by another regular file.

        Control characters are escaped except tabs; SGR sequences are kept or dropped. A line ends with a newline, also
        if it ended with a carriage return.
        """
        rest, self._rest = self._rest, ""
        if rest:
            yield rest
        while True:
            yield from self._parts()
            if (newer := self._reopened()) is None:
                return
            # What was added before the file was replaced.
            yield from self._parts()
            self._file.close()
            self._file = newer

    def _parts(self) -> Iterator[str]:
        while part := self._file.readline(MAX_PART_BYTES):
            yield self._escape(part.decode(errors="replace"))

    def _reopened(self) -> BinaryIO | None:
        """Return the file at the path if it is another one or became shorter than what was read."""
        try:
            named = self._path.lstat()
            is_same = os.path.samestat(os.fstat(self._file.fileno()), named)
            return None if is_same and named.st_size >= self._file.tell() else open_regular_file(self._path)
        except OSError:
            return None

    def _escape(self, text: str) -> str:
        lines = []
        for line in text.splitlines(keepends=True):
            content = line.splitlines()[0]
            lines.append(self._clean(content) + ("\n" if content != line else ""))
        return "".join(lines)


def open_log(log: Path, *, colors: bool = False, count: int | None = None) -> list[LogReader]:
    """Return readers of the files of a log, the oldest first, which begin with the last `count` lines of all of them.
    Only the last reader has to be read again. Raises OSError if the log is missing or not a regular file."""
    *older, _ = log_files(log)
    readers = [LogReader(log, colors=colors)]
    for path in reversed(older):
        with suppress(OSError):
            readers.insert(0, LogReader(path, colors=colors))
    if count is None:
        return readers
    last: list[LogReader] = []
    while readers and count > 0:
        last.insert(0, readers.pop())
        count -= last[0].skip_to_last(count)
    return last
