"""Read metrics from a JSON file that is rewritten whole: a list of rows, or a list of numbers for each metric.

Trainers of their own dump the first, and Keras' `History.history` is the second: `{"loss": [1.0, 0.9], …}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.foreign.growing_file import read_head
from engine.foreign.line_names import is_result
from engine.foreign.reading import (
    MAX_ROW_VALUES,
    MAX_SNIFFED_FILES,
    POLL_BYTES,
    Columns,
    Listing,
    Log,
    MetricNames,
    Reading,
    flat_numbers,
    row_points,
    to_number,
)
from engine.utils.files import find_file_stamp, read_bytes

MAX_FILE_BYTES = 1 << 24
MAX_SNIFFED_BYTES = 1 << 20


def find(listing: Listing) -> list[Log]:
    """Return a log for each JSON file that is a list of rows with a step or an epoch, or lists of results."""
    names = [name for name in listing.files if name.endswith(".json")][:MAX_SNIFFED_FILES]
    return [_log(path) for path in (listing.folder / name for name in names) if _is_log(path)]


def _log(path: Path) -> Log:
    return Log("json", (path,), lambda: JsonFile(path))


def _is_log(path: Path) -> bool:
    # Another file of a data set has many megabytes.
    head = read_head(path, MAX_SNIFFED_BYTES + 1)
    if head.lstrip()[:1] not in (b"[", b"{") or len(head) > MAX_SNIFFED_BYTES:
        return False
    rows = list(_rows(head))
    columns = [Columns.find(row) for row in rows[:2]]
    has_axis = any(column.step or column.epoch for column in columns)
    return any(len(row) > has_axis for row in rows) and (has_axis or any(map(is_result, rows[0])))


def _rows(data: bytes) -> Iterator[dict[str, float]]:
    """Yield the rows of a file; none if it is something else."""
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(found, list):
        yield from (flat_numbers(row) for row in found if isinstance(row, dict))
    elif isinstance(found, dict):
        lists = {key: values for key, values in list(found.items())[:MAX_ROW_VALUES] if isinstance(values, list)}
        for index in range(max(map(len, lists.values()), default=0) if len(lists) == len(found) else 0):
            numbers = ((key, to_number(values[index])) for key, values in lists.items() if index < len(values))
            yield {key: number for key, number in numbers if number is not None}


class JsonFile:
    """Follows one file, which is read again as a whole when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._names = MetricNames()
        self._problem: str | None = None
        self._size = 0

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read the file if it has changed."""
        del max_bytes  # A part of the file is no JSON.
        reading, stamp = Reading(), find_file_stamp(self._path)
        if stamp is not None and stamp != self._stamp:
            was_read, self._stamp = self._stamp is not None, stamp
            self._read(reading)
            # While it is written, it is no JSON.
            reading.drop_from = -math.inf if was_read and reading.points else None
        reading.read_bytes = reading.total_bytes = self._size
        reading.problem = self._problem or self._names.problem
        return reading

    def _read(self, reading: Reading) -> None:
        self._problem = None
        try:
            data = read_bytes(self._path, MAX_FILE_BYTES)
        except OSError as error:
            self._problem = f"{self._path.name} cannot be read: {error.strerror}"
            return
        self._size = len(data)
        number = 0
        for number, row in enumerate(_rows(data), 1):
            reading.points.extend(row_points(row, Columns.find(row), number - 1, self._names))
        if not number:
            self._problem = f"{self._path.name} is damaged or incomplete"
