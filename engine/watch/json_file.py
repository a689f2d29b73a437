"""Read metrics from a JSON file that is rewritten whole: rows, or lists of numbers for each metric.

Trainers of their own dump a list of rows, or an object of rows by epoch. Keras' `History.history` has a list of numbers
for each metric, and the results of XGBoost, LightGBM and Ludwig have them by data set. Sacred's `metrics.json` has the
steps and the values of each metric. AllenNLP writes a file for each epoch. `row_files` finds the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from engine.base.files import find_file_stamp, read_bytes
from engine.base.units import format_bytes
from engine.watch.csv_file import AXES_OF_NUMBERS
from engine.watch.json_lines import is_log_row
from engine.watch.line_names import is_result
from engine.watch.reading import (
    MAX_ROW_VALUES,
    NO_CHOICE,
    POLL_BYTES,
    UNIX_TIMES,
    ColumnChoice,
    Columns,
    MetricNames,
    Reading,
    flat_numbers,
    list_folder,
    parse_json,
    parse_json_values,
    row_points,
    to_number,
)

MAX_FILE_BYTES = 1 << 26
MAX_DEPTH = 4
MAX_SERIES = 100
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{},]', re.DOTALL)
_NUMBER_AT_END = re.compile(r"\D*?(\d{1,15})")
SERIES_FILE = re.compile(r"(.*?)(\d{1,15})\.json")
"""The name of a file for one epoch or step."""


def is_log(head: str, stem: str, *, is_whole: bool, choice: ColumnChoice = NO_CHOICE) -> bool:
    """Whether the beginning of a document is that of a log."""
    found = parse_json(head if is_whole else closed(head)) or parse_json_values(head)
    rows = list(rows_of(found, stem))
    return any(is_log_row(row, choice) for row in rows[:2])


def closed(head: str) -> str:
    """Return the beginning of a JSON document as one, which ends after the last complete value."""
    brackets, end, rest = list[str](), 0, ""
    for match in _TOKEN.finditer(head):
        sign = match[0]
        if sign in ("[", "{"):
            brackets.append("]" if sign == "[" else "}")
        elif sign in ("]", "}") and brackets:
            brackets.pop()
        elif sign == ",":
            end, rest = match.start(), "".join(reversed(brackets))
    return head[:end] + rest


def rows_of(found: Any, stem: str) -> Iterator[dict[str, float]]:
    """Yield the rows of a document, whose file has the name `stem`; none if it is something else."""
    if isinstance(found, list):
        yield from _rows_of_list(found, stem)
    elif isinstance(found, dict):
        numbers = [_NUMBER_AT_END.fullmatch(key) for key in found]
        rows = [flat_numbers(row) for row in found.values() if isinstance(row, dict)]
        if len(rows) == len(found) and all(numbers) and any(is_result(name) for row in rows for name in row):
            yield from ({"epoch": float(match[1]), **row} for match, row in zip(numbers, rows, strict=True) if match)
        else:
            yield from _rows_of_lists(dict(_lists(found, "", MAX_DEPTH)), are_all=not flat_numbers(found))


def _rows_of_list(values: list[Any], name: str) -> Iterator[dict[str, float]]:
    """Yield the rows of a list: of objects, of numbers, or of lists of a step and a number."""
    if values and isinstance(values[0], dict):
        yield from (flat_numbers(row) for row in values if isinstance(row, dict))
        return
    for index, row in enumerate(values):
        cells = [to_number(cell) for cell in (row if isinstance(row, list) else [index, row])]
        numbers = [cell for cell in cells if cell is not None]
        if not name or len(cells) not in (2, 3) or len(numbers) < len(cells):
            return
        names = list(AXES_OF_NUMBERS[len(numbers)])
        if numbers[0] >= UNIX_TIMES[0]:
            names[0] = "wall_time"  # TensorBoard's download
        yield dict(zip([*names, name], numbers, strict=True))


def _lists(found: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists of an object and those within, under names with dots."""
    for key, value in list(found.items())[:MAX_ROW_VALUES]:
        if isinstance(value, list) and value:
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) and depth > 1:
            yield from _lists(value, f"{prefix}{key}.", depth - 1)


def _rows_of_lists(lists: dict[str, list[Any]], *, are_all: bool) -> Iterator[dict[str, float]]:
    """Yield the rows of lists by name: of all, or of those with the name of a result and the lists of rows."""
    plain: dict[str, list[Any]] = {}
    for name, values in lists.items():
        base, _, end = name.rpartition(".")
        steps = lists.get(f"{base}.steps", [])
        if end == "values" and len(steps) == len(values):
            yield from _rows_of_list([list(pair) for pair in zip(steps, values, strict=True)], base)
        elif steps and f"{base}.values" in lists:
            continue
        elif isinstance(values[0], dict):
            rows = list(_rows_of_list(values, name))
            yield from rows if any(map(is_log_row, rows[:2])) else ()
        elif isinstance(values[0], list):
            yield from _rows_of_list(values, name if is_result(name) else "")
        elif any(Columns.find([name])[:2]) or is_result(name) or are_all:
            plain[name] = values
    for index in range(max(map(len, plain.values()), default=0)):
        cells = ((name, to_number(values[index])) for name, values in plain.items() if index < len(values))
        yield {name: number for name, number in cells if number is not None}


class JsonFile:
    """Follows one file, which is read again as a whole when it has changed; or those of a series with one beginning."""

    def __init__(self, path: Path, choice: ColumnChoice = NO_CHOICE, series: str = "") -> None:
        self._path, self._choice, self._series = path, choice, series
        self._stamp: list[tuple[int, int, int] | None] = []
        self._names = MetricNames()
        self._problem: str | None = None
        self._size = 0

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read the file if it has changed."""
        del max_bytes  # A part of the file is no JSON.
        reading, paths = Reading(), self._paths()
        stamp = [find_file_stamp(path) for path in paths]
        if any(stamp) and stamp != self._stamp:
            was_read, self._stamp = bool(self._stamp), stamp
            self._problem, self._size = None, 0
            for path in paths:
                self._read(path, reading)
            # While it is written, it is no JSON.
            reading.drop_from = -math.inf if was_read and reading.points else None
        reading.read_bytes = reading.total_bytes = self._size
        reading.problem = self._problem or self._names.problem
        return reading

    def _paths(self) -> list[Path]:
        if not self._series:
            return [self._path]
        matches = [SERIES_FILE.fullmatch(name) for name in list_folder(self._path.parent).files]
        numbers = sorted((int(match[2]), match[0]) for match in matches if match and match[1] == self._series)
        return [self._path.with_name(name) for _, name in numbers[:MAX_SERIES]]

    def _read(self, path: Path, reading: Reading) -> None:
        try:
            data = read_bytes(path, MAX_FILE_BYTES + 1)
        except OSError as error:
            self._problem = f"{path.name} cannot be read: {error.strerror}"
            return
        self._size += len(data)
        if len(data) > MAX_FILE_BYTES:
            self._problem = f"{path.name} has more than {format_bytes(MAX_FILE_BYTES)}, which are not read"
            return
        before = len(reading.points)
        for number, row in enumerate(self._rows(path, data, reading)):
            reading.points.extend(row_points(row, Columns.find(row, self._choice.x), number, self._names, self._choice))
        if len(reading.points) == before and not reading.parameters:
            self._problem = f"{path.name} is damaged or incomplete"

    def _rows(self, path: Path, data: bytes, reading: Reading) -> Iterable[dict[str, float]]:
        """Return the rows of a file."""
        found: Any = parse_json(data) or parse_json_values(data.decode(errors="replace"))
        if not self._series:
            return rows_of(found, path.stem)
        match = SERIES_FILE.fullmatch(path.name)
        return [{"epoch": float(match[2]), **flat_numbers(found)}] if match and isinstance(found, dict) else []
