"""Append the metrics that were found in the output of a command to a file of JSON lines, which `engine.watch` reads.
The process that writes them gets them from here (`WrittenRows`).

The size of the file is bounded in practice: the faster a command prints, and the larger the file is, the fewer rows are
written. The last one always is.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.base.files import file_size, open_regular_file
from engine.watch.json_lines import JsonLines
from engine.watch.points import Point
from engine.watch.reading import POLL_BYTES, Columns, Reading, parse_json_object, to_number

# 10,000 rows at once, then 4 rows per second, half of that when the file has 8 MiB: about 60 MB in a week.
BURST_BYTES, BYTES_PER_SECOND, HALVING_BYTES = 1 << 20, 400, 1 << 23
FILE_MODE = 0o600
LAST_BYTES = 1 << 16


class MetricWriter:
    """Appends points as rows: one for each step, with the values that came last. Not safe for threads.

    `problem` is why a row could not be written, None if the last one was.
    """

    def __init__(
        self, path: Path, now: Callable[[], float] = time.monotonic, wall_time: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._now, self._wall_time = now, wall_time
        self._row: dict[str, float] = {}
        self._step, self._time = 0, 0.0
        self._written: dict[str, float] = {}
        """What was written for the step `_written_step`."""
        self._written_step: int | None = None
        self._size, self._budget, self._last_refill = 0, float(BURST_BYTES), now()
        self._source, self._is_open = WrittenRows(path), False
        self.problem: str | None = None

    def open(self) -> WrittenRows:
        """Return a source of the rows, those of earlier starts of the command first."""
        if self._is_open:
            self._source = WrittenRows(self._path)
        self._is_open = True
        return self._source

    def add(self, points: Sequence[Point]) -> None:
        """Add points. They are written when those of another step come, or by `poll`."""
        for point in points:
            if self._row and point.step != self._step:
                self._write()
                # Without budget, the next step takes the place of this one.
                self._row = {}
            if not self._row:
                self._step = point.step
            if point.step == self._written_step and point.name in self._written:
                # For readers, a training was resumed at a step that comes again: the earlier values of it are void.
                self._row = self._written | self._row
            if point.epoch is not None:
                self._row.setdefault("epoch", point.epoch)
            self._row[point.name] = point.value
            self._time = self._wall_time()

    def poll(self) -> None:
        """Write the values. To be called about once per second: a bar that is redrawn changes those of a step."""
        if self._row and self._write():
            self._row = {}

    def close(self) -> None:
        """Write the last values."""
        self._budget = max(self._budget, BURST_BYTES)
        if self._row:
            self._write()
        self._row = {}

    def _write(self) -> bool:
        """Append the row if the budget allows it. Return whether it did."""
        now = self._now()
        rate = BYTES_PER_SECOND / (1 + self._size / HALVING_BYTES)
        self._budget = min(self._budget + (now - self._last_refill) * rate, BURST_BYTES)
        self._last_refill = now
        if self._budget <= 0:
            return False
        row = {"step": self._step, **self._row, "_timestamp": round(self._time, 3)}
        line = json.dumps(row).encode() + b"\n"
        try:
            self._size = _append(self._path, line)
            self._source.put(row, self._size)
            self.problem = None
        except OSError as error:
            self.problem = f"{self._path.name} cannot be written: {error.strerror}"
            return False
        self._written = (self._written if self._step == self._written_step else {}) | self._row
        self._written_step = self._step
        # A row may be larger than what is left.
        self._budget -= len(line)
        return True


class WrittenRows(JsonLines):
    """The rows that the file has, then those that are written, without reading them back."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._first_size, self._size = file_size(path), 0
        self._rows: list[tuple[Mapping[str, float], int]] = []

    def put(self, row: Mapping[str, float], size: int) -> None:
        """Take a row that was written, with the size of the file behind it."""
        self._rows.append((row, size))

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        if self._file.offset < self._first_size:
            reading = super().poll(max_bytes)
            self._size = self._file.offset
            return reading
        reading, written = Reading(), [(row, size) for row, size in self._rows if size > self._size]
        for row, self._size in written:
            self.add_row(row, Columns.find(row), reading)
        self._rows.clear()
        reading.read_bytes = reading.total_bytes = self._size
        reading.problem = self._names.problem
        return reading


def find_last_position(path: Path) -> tuple[int, float | None] | None:
    """Return the step and the epoch of the last row that an earlier start of the command wrote; None without one."""
    try:
        with open_regular_file(path) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - LAST_BYTES, 0))
            lines = file.read(LAST_BYTES).splitlines()
    except OSError:
        return None
    rows = (parse_json_object(line) for line in reversed(lines))
    found = ((row.get("step"), row.get("epoch")) for row in rows if row is not None)
    positions = ((step, to_number(epoch)) for step, epoch in found if isinstance(step, int))
    return next(positions, None)


def _append(path: Path, line: bytes) -> int:
    """Append a line as a whole or not at all, and return the size of the file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    try:
        size = os.fstat(descriptor).st_size
        written = os.write(descriptor, line)
        if written < len(line):
            # A full disk takes a part of it.
            os.ftruncate(descriptor, size)
            raise OSError(28, os.strerror(28))
        return size + len(line)
    finally:
        os.close(descriptor)
