"""Read what is appended to a file, and notice that it was truncated, replaced or rewritten.

The readers of files in this package use it. A file is open only during a poll.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from engine.base.files import open_regular_file
from engine.base.text import pluralize, printable
from engine.watch.line_names import is_result, source_of_row, with_source
from engine.watch.reading import (
    NO_CHOICE,
    POLL_BYTES,
    ColumnChoice,
    Columns,
    MetricNames,
    Reading,
    row_points,
    to_number,
)
from engine.watch.restarts import Restarts

# A rewritten file that begins with the same bytes, and has the same bytes before the position, has only grown.
HEAD_BYTES = 4096
TAIL_BYTES = 256
# A longer line is skipped.
MAX_LINE_BYTES = 1 << 18
# A last line without a line break counts as complete if nothing was written for this time.
SETTLED_SECONDS = 10.0
# In a row with one value, which metric it is: `step,metric,value`.
VALUE, VALUE_NAMES = "value", ("metric", "metric_name", "name", "tag", "key", "variant")
NO_TEXTS: Mapping[str, object] = {}


class GrowingFile:
    """A regular file and the position up to which it has been read. Links, pipes and devices are never opened.

    What is behind `limit` bytes is not of the run that is read, and is not there.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path, self._limit = path, limit
        self.offset = self.size = 0
        self._fd = -1
        self._stamp = (0, 0)
        self._head = self._tail = b""
        self._is_shrunk = self._skips_line = False

    @contextmanager
    def opened(self) -> Iterator[bool]:
        """Open the file for reading. Yield whether it was replaced, which sets the position to 0. Raises OSError."""
        with open_regular_file(self.path) as file:
            self._fd = file.fileno()
            status = os.fstat(self._fd)
            stamp = (status.st_ino, status.st_mtime_ns)
            self.size = status.st_size if self._limit is None else min(status.st_size, self._limit)
            was_replaced = self._was_replaced(stamp)
            if was_replaced:
                self.offset, self._head, self._is_shrunk, self._skips_line = 0, b"", False, False
            try:
                yield was_replaced
            finally:
                if self.offset <= self.size:
                    self._stamp = stamp
                    self._remember()
                self._fd = -1

    def _was_replaced(self, stamp: tuple[int, int]) -> bool:
        if self.size < self.offset:
            # A file that is rewritten is short for a moment.
            was_shrunk, self._is_shrunk = self._is_shrunk, True
            return was_shrunk
        self._is_shrunk = False
        if stamp == self._stamp or not self.offset:
            return False
        head = os.pread(self._fd, len(self._head), 0)
        return head != self._head or os.pread(self._fd, len(self._tail), self.offset - len(self._tail)) != self._tail

    def _remember(self) -> None:
        if len(self._head) < min(self.offset, HEAD_BYTES) or self.offset < len(self._head):
            self._head = os.pread(self._fd, min(self.offset, HEAD_BYTES), 0)
        length = min(self.offset, TAIL_BYTES)
        self._tail = os.pread(self._fd, length, self.offset - length)

    @property
    def unread_bytes(self) -> int:
        """Number of bytes after the position when the file was opened."""
        return max(self.size - self.offset, 0)

    def read(self, max_bytes: int) -> bytes:
        """Return at most `max_bytes` from the position on, and keep the position."""
        return os.pread(self._fd, min(max_bytes, self.unread_bytes), self.offset)

    @property
    def _encoding(self) -> str:
        """The encoding that the file begins with; "" for UTF-8. Windows' PowerShell writes UTF-16."""
        begin = self._head[:2] or os.pread(self._fd, 2, 0)
        return {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(begin, "")

    def _read_unusual_lines(self, data: bytes, encoding: str) -> list[bytes]:
        """Return the complete lines of a file in UTF-16, or of one whose lines end in a carriage return."""
        encoding = encoding or "latin-1"
        text = (
            data[: len(data) // 2 * 2].decode(encoding, "replace") if encoding != "latin-1" else data.decode(encoding)
        )
        end = max(text.rfind("\n"), text.rfind("\r")) + 1
        if end == 0 and len(data) == self.unread_bytes and time.time() - os.fstat(self._fd).st_mtime > SETTLED_SECONDS:
            end = len(text)
        self.offset += len(text[:end].encode(encoding))
        lines = text[:end].splitlines()
        return [line.encode("utf-8" if encoding != "latin-1" else encoding) for line in lines]

    def read_lines(self, max_bytes: int) -> list[bytes]:
        """Return complete lines of at most `max_bytes`, and move the position behind them.

        A line of more than `MAX_LINE_BYTES` is skipped.
        """
        data = self.read(max(max_bytes, MAX_LINE_BYTES))
        encoding = self._encoding
        if encoding or (b"\r" in data and b"\n" not in data and b"\n" not in self._head):
            return self._read_unusual_lines(data, encoding)
        end = data.rfind(b"\n") + 1
        is_last = len(data) == self.unread_bytes
        if end == 0 and len(data) >= MAX_LINE_BYTES:
            self._skips_line = True
            self.offset += len(data)
            return []
        if is_last and end < len(data) and time.time() - os.fstat(self._fd).st_mtime > SETTLED_SECONDS:
            end = len(data)
        self.offset += end
        lines = data[:end].split(b"\n")
        if lines[-1] == b"":
            lines.pop()
        if self._skips_line and lines:
            self._skips_line = False
            lines = lines[1:]
        return [line for line in lines if len(line) <= MAX_LINE_BYTES]


class RowFile:
    """A source that follows one file. Its format restores its own state in `restart`, and reads in `read`."""

    def __init__(
        self,
        path: Path,
        limit: int | None = None,
        choice: ColumnChoice = NO_CHOICE,
        group: str = "",
        begin: int = 0,
    ) -> None:
        """With a `group`, the names of the metrics begin with it. Of the rows before `begin`, only headings count."""
        self._begin = begin
        self._file = GrowingFile(path, limit)
        self._names, self._lacks_x = MetricNames(), False
        self._choice, self._group = choice, f"{group}/" if group else ""
        self._forget_rows()
        self.restart()

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read the complete rows of at most about `max_bytes`."""
        reading = Reading()
        try:
            with self._file.opened() as was_replaced:
                if was_replaced:
                    reading.drop_from, self._begin = -math.inf, 0
                    self._forget_rows()
                    self.restart()
                if self._begin > self._file.offset:
                    self.read(POLL_BYTES, Reading())
                    self._file.offset = self._begin
                    self._forget_rows()
                self.read(max_bytes, reading)
        except OSError as error:
            reading.problem = f"{self._file.path.name} cannot be read: {error.strerror}"
        reading.read_bytes, reading.total_bytes = self._file.offset, self._file.size
        reading.problem = reading.problem or self.problem or self._names.problem
        return reading

    def _forget_rows(self) -> None:
        self._num_rows = self._num_damaged = 0
        self._restarts = Restarts()
        self._rank: float | None = None
        self._last_step, self._last_epoch, self._counts_rows = -1, -math.inf, False

    @property
    def problem(self) -> str | None:
        """Which rows are skipped or void, as a clause; None if all count."""
        name, reasons = self._file.path.name, []
        if self._num_damaged:
            reasons.append(f"{name} has {pluralize(self._num_damaged, 'damaged line')}")
        if self._lacks_x:
            reasons.append(f"{name} has no column {printable(self._choice.x)}: its rows are counted")
        is_empty = self._names.is_empty and (not self._num_rows or self._choice.metrics)
        if self._file.size and not self._file.unread_bytes and is_empty:
            reasons.append(f"no line of {name} is read as metrics")
        return "; ".join(reasons) or None

    def add_row(
        self, row: Mapping[str, float], columns: Columns, reading: Reading, texts: Mapping[str, object] = NO_TEXTS
    ) -> None:
        """Add the points of one row. The repeated steps of a resumed run void the earlier ones.

        `texts` may say what the values were measured on, or what the one in the column `value` is.
        """
        # Of several ranks, the rows of the first one count.
        rank = row.get("rank")
        self._rank = rank if self._rank is None else self._rank
        if rank != self._rank:
            return
        if texts:
            row = _named(row, columns, texts)
            if columns.step and source_of_row(texts) and row.get(columns.step, math.inf) < self._last_step:
                # The batches of a validation: it is of the latest step of the training.
                row = {**row, columns.step: float(self._last_step)}
        self._lacks_x = bool(self._choice.x) and not columns.epoch
        epoch = row.get(columns.epoch, math.nan) if columns.epoch else math.nan
        # One rule for all rows from there on: whole epochs between fractions are no steps, nor is a counter that starts
        # again in each epoch.
        if columns.step:
            is_lower = row.get(columns.step, math.inf) < self._last_step
            self._counts_rows = self._counts_rows or (is_lower and epoch > self._last_epoch)
        else:
            self._counts_rows = self._counts_rows or (math.isfinite(epoch) and epoch % 1 != 0)
        number = self._last_step + 1 if self._counts_rows else self._num_rows
        points = list(row_points(row, columns, number, self._names, self._choice, counts_rows=self._counts_rows))
        if self._group:
            points = [point._replace(name=self._group + point.name) for point in points]
        self._restarts.add_row(points, reading)
        if points:
            # Rows of a validation may have a counter of their own.
            step = points[0].step
            self._last_step = step if epoch < self._last_epoch else max(self._last_step, step)
        self._last_epoch = epoch if math.isfinite(epoch) else self._last_epoch
        self._num_rows += 1

    def restart(self) -> None:
        """Begin to read the file, also after it was replaced."""

    def read(self, max_bytes: int, reading: Reading) -> None:
        """Add what is new in the open file. Raises OSError."""
        raise NotImplementedError


def _named(row: Mapping[str, float], columns: Columns, texts: Mapping[str, object]) -> Mapping[str, float]:
    """Return a row with the names that its texts give its values."""
    names = [text for key in VALUE_NAMES if isinstance(text := texts.get(key), str) and to_number(text) is None]
    if names and VALUE in row and not any(map(is_result, row)):
        axes = {name: value for name, value in row.items() if name in columns}
        return {**axes, "/".join(names): row[VALUE]}
    if source := source_of_row(texts):
        return {name if name in columns else with_source(name, source): value for name, value in row.items()}
    return row


class FolderFile(Protocol):
    """A file of a `FileFolder`."""

    file: GrowingFile
    is_held: bool
    """Whether the files after it have to wait for the next poll."""
    problem: str | None
    """Which part of the file is unreadable or skipped, as a clause."""

    def poll(self, max_bytes: int, reading: Reading) -> tuple[int, bool]:
        """Add what is new, and return the bytes read and whether the file was replaced. Raises OSError."""
        ...


class FileFolder:
    """A source that follows files of one folder, which begin again together. Its format adds the files that are new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = MetricNames()
        self._files: dict[Path, FolderFile] = {}

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read at most about `max_bytes`, from the first file on."""
        reading, left = Reading(), max_bytes
        self.add_files()
        for path, each in self._files.items():
            try:
                num_read, was_replaced = each.poll(left, reading)
            except OSError as error:
                reading.problem = f"{path.relative_to(self._folder)} cannot be read: {error.strerror}"
                continue
            if was_replaced:
                # The points of the files cannot be told apart, so that all files are read again.
                self._files.clear()
                return Reading(drop_from=-math.inf, total_bytes=1)
            left -= num_read
            if each.is_held:
                break
        reading.read_bytes = sum(each.file.offset for each in self._files.values())
        reading.total_bytes = sum(each.file.size for each in self._files.values())
        problems = (each.problem for each in self._files.values())
        reading.problem = reading.problem or next(filter(None, problems), None) or self._names.problem
        return reading

    def add_files(self) -> None:
        """Add the files that are new."""
        raise NotImplementedError


def head_lines(path: Path, num_bytes: int) -> list[bytes]:
    """Return the lines at the beginning of a file, see `lines_of`."""
    return lines_of(read_head(path, num_bytes))


def lines_of(head: bytes) -> list[bytes]:
    """Return the lines at the beginning of a file, whatever ends them, in UTF-8."""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        head = head[: len(head) // 2 * 2].decode("utf-16", "replace").encode()
    return head.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")


def read_head(path: Path, num_bytes: int) -> bytes:
    """Return the beginning of a regular file, b"" if it is inaccessible or something else."""
    try:
        with open_regular_file(path) as file:
            return os.pread(file.fileno(), num_bytes, 0)
    except OSError:
        return b""
