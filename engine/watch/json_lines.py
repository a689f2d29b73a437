"""Read metrics from files with a JSON object, or a list of them, per line.

Such files are written by trainers of their own, by MMEngine (`scalars.json`), Detectron2 (`metrics.json`), those that
follow DeiT (`log.txt`), Ray Tune (`result.json`), and with a word before the object by NVIDIA's DLLogger and MLPerf's
logging. Format: https://jsonlines.org. `row_files` finds the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from engine.watch.growing_file import MAX_LINE_BYTES, RowFile
from engine.watch.line_names import is_result
from engine.watch.parameters import flatten
from engine.watch.reading import NO_CHOICE, PARAMETER_NAMES, ColumnChoice, Columns, Reading, flat_numbers, parse_json

MAX_SNIFFED_LINES = 20
# `DLLL {`, `:::MLLOG {`
_WORD = re.compile(rb"\s*[:A-Z]{0,12} (?=\{)")


def is_log(lines: Iterable[bytes], choice: ColumnChoice = NO_CHOICE) -> bool:
    """Whether one of the first lines has a step or an epoch, and another number, or a result.

    The first line may be the configuration.
    """
    rows = (row for line in list(lines)[:MAX_SNIFFED_LINES] for row in rows_of_line(line))
    return any(is_log_row(flat_numbers(row), choice) for row in rows)


def is_log_row(row: dict[str, float], choice: ColumnChoice = NO_CHOICE) -> bool:
    """Whether a row has a step or an epoch, and another number, or a result."""
    columns = Columns.find(row, choice.x)
    has_axis = columns.step is not None or columns.epoch is not None
    return len(row) > 1 if has_axis else any(choice.is_metric(n) if choice.metrics else is_result(n) for n in row)


def rows_of_line(line: bytes) -> list[dict[str, Any]]:
    """Return the objects of a line; none if it is something else."""
    match = _WORD.match(line)
    found = parse_json(line[match.end() :] if match else line)
    rows = [row for row in (found if isinstance(found, list) else [found]) if isinstance(row, dict)]
    for row in rows:
        # DLLogger has the epoch and the iteration as a list.
        if isinstance(steps := row.get("step"), list):
            row |= zip(("epoch", "step"), steps[:2], strict=False)
    return rows


class JsonLines(RowFile):
    """Follows one file of JSON lines. Lines that are no JSON objects are passed over."""

    def read(self, max_bytes: int, reading: Reading) -> None:
        # At least the longest line that is read.
        for line in self._file.read_lines(max(max_bytes, MAX_LINE_BYTES)):
            rows = rows_of_line(line)
            self._num_damaged += not rows and line.lstrip().startswith(b"{")
            for found in rows:
                self._read_row(found, reading)

    def _read_row(self, found: dict[str, Any], reading: Reading) -> None:
        for name in PARAMETER_NAMES.intersection(found):
            if isinstance(found[name], dict):
                reading.parameters |= flatten(found.pop(name))
        row = flat_numbers(found)
        if row:
            self.add_row(row, Columns.find(row, self._choice.x), reading, found)
