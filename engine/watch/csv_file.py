"""Read metrics from CSV files that grow, or that are rewritten whole.

The first line names the columns. Lightning's `CSVLogger` leaves cells empty and rewrites `metrics.csv` when a column is
added, ultralytics' `results.csv` has blanks around names and numbers, timm's `summary.csv` repeats its heading when a
run is resumed, and Keras' `CSVLogger` may separate with any character (https://keras.io/api/callbacks/csv_logger/). A
file of few numbers in each line, which `numpy.savetxt` and d3rlpy write, needs no heading: its name is that of the
metric. `row_files` finds the files.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from engine.watch.growing_file import VALUE_NAMES, RowFile
from engine.watch.line_names import SPLIT_NAMES, is_result, is_setting
from engine.watch.reading import (
    MAX_ROW_VALUES,
    NO_CHOICE,
    ColumnChoice,
    Columns,
    Reading,
    parse_cell,
)

_DELIMITERS = ",;\t"
COMMENT = b"#"
_TEXT_COLUMNS = frozenset({*SPLIT_NAMES, *VALUE_NAMES})
# Text below such a name says nothing against a log.
_TEXT_NAME = re.compile(rf"(?:{'|'.join(SPLIT_NAMES)})|(?:.*[_ ])?(?:date|time|timestamp|datetime)", re.IGNORECASE)
# The columns before the value in a line without names, which never decrease.
AXES_OF_NUMBERS = {1: (), 2: ("step",), 3: ("epoch", "step")}


def is_log(lines: Iterable[bytes], stem: str, choice: ColumnChoice = NO_CHOICE, *, is_known: bool = False) -> bool:
    """Whether the first lines of a table are those of a log: with a column of steps or epochs and another one, or with
    results in rows of numbers, or of numbers without a heading in a file with the name of a result. The columns of a
    table whose name is known may have any names."""
    first, *rows = [line for line in lines if line.strip() and not line.startswith(COMMENT)][:3] or [b""]
    if name_columns(first, stem):
        return all(name_columns(row, stem) for row in rows) and _are_axes([numbers_of(row) for row in (first, *rows)])
    heading, delimiter = split_row(first)
    columns = Columns.find(heading, choice.x)
    if len(heading) > 1 and (columns.step or columns.epoch):
        return True
    if not is_known and not any(choice.is_metric(name) if choice.metrics else is_result(name) for name in heading):
        return False
    # A table of runs has their settings and the names of their models.
    has_texts = any(
        cell and parse_cell(cell, decimal_commas=True) is None and not _TEXT_NAME.fullmatch(name)
        for row in rows
        for name, cell in zip(heading, split_row(row, delimiter)[0], strict=False)
    )
    return not has_texts and (is_known or (bool(rows) and not any(map(is_setting, heading))))


def name_columns(line: bytes, stem: str) -> list[str]:
    """Return the names of the columns of a line that is numbers only; none for any other line."""
    numbers = numbers_of(line)
    return [*AXES_OF_NUMBERS[len(numbers)], stem] if len(numbers) in AXES_OF_NUMBERS and is_result(stem) else []


def numbers_of(line: bytes) -> list[float]:
    """Return the numbers of a line; none if there is anything else."""
    text = line.decode(errors="replace")
    cells = [parse_cell(cell) for cell in text.replace(",", " ").replace(";", " ").split()]
    numbers = [cell for cell in cells if cell is not None]
    return numbers if len(numbers) == len(cells) else []


def _are_axes(rows: list[list[float]]) -> bool:
    """Whether the numbers before the last one never decrease, and all lines have as many."""
    return len(rows) > 1 and all(
        len(before) == len(after) and all(a <= b for a, b in zip(before[:-1], after[:-1], strict=True))
        for before, after in pairwise(rows)
    )


def split_row(line: bytes, delimiter: str = "") -> tuple[list[str], str]:
    """Return the cells of a line without the blanks around them, and the delimiter.

    Without a `delimiter`, it is the one of comma, semicolon and tab that the line has most of.
    """
    text = line.decode(errors="replace").removeprefix("\ufeff")
    delimiter = delimiter or max(_DELIMITERS, key=text.count)
    if '"' in text:
        try:
            cells = next(csv.reader([text], delimiter=delimiter), [])
        except csv.Error:
            cells = []
    else:
        cells = text.split(delimiter)
    return [cell.strip() for cell in cells], delimiter


class CsvFile(RowFile):
    """Follows one CSV file."""

    def restart(self) -> None:
        self._heading: list[str] = []
        self._comment = b""
        """The last line before the heading, which may be it."""
        self._is_cut = self._has_long_rows = self._has_texts = self._is_bare = False
        self._columns = Columns(None, None, None)
        self._delimiter = ""

    def read(self, max_bytes: int, reading: Reading) -> None:
        for line in self._file.read_lines(max_bytes):
            self._read_row(line, reading)

    def _read_row(self, line: bytes, reading: Reading) -> None:
        if not self._heading:
            if line.startswith(COMMENT) or not line.strip():
                self._comment = line.lstrip(b"# ")
                return
            names = name_columns(line, self._file.path.stem)
            heading, self._delimiter = split_row(line)
            self._is_bare = bool(names)
            if not names and (is_row := len(numbers_of(line)) >= len(heading)):
                # The names of the columns are in a comment, or nowhere.
                heading, cells = split_row(self._comment, self._delimiter)[0], heading
                if len(heading) != len(cells):
                    return
            self._set_heading(names or heading)
            if not names and not is_row:
                return
        if self._is_bare:
            row = dict(zip(self._heading, numbers_of(line), strict=False))
            if len(row) == len(self._heading):
                self.add_row(row, self._columns, reading)
            return
        cells, _ = split_row(line, self._delimiter)
        has_decimal_commas = self._delimiter != ","
        row = {}
        for name, cell in zip(self._heading, cells, strict=False):
            if cell and name and (number := parse_cell(cell, decimal_commas=has_decimal_commas)) is not None:
                row[name] = number
        if row:
            self._has_long_rows = self._has_long_rows or len(cells) > len(self._heading)
            texts = dict(zip(self._heading, cells, strict=False)) if self._has_texts else {}
            self.add_row(row, self._columns, reading, texts)
        elif any(Columns.find(cells)[:2]) or cells == self._heading:
            # A resumed run writes a heading again, maybe with other columns.
            self._set_heading(cells)
            self._restarts.expect()

    def _set_heading(self, cells: list[str]) -> None:
        self._is_cut = len(cells) > MAX_ROW_VALUES
        self._heading = cells[:MAX_ROW_VALUES]
        if len(set(self._heading)) < len(self._heading):
            counts = Counter[str]()
            for index, name in enumerate(self._heading):
                self._heading[index] = f"{name}.{counts[name]}" if counts[name] and name else name
                counts[name] += 1
        self._columns = Columns.find(self._heading, self._choice.x)
        self._has_texts = not _TEXT_COLUMNS.isdisjoint(self._heading)

    @property
    def problem(self) -> str | None:
        reasons = [super().problem]
        if self._is_cut:
            reasons.append(f"only the first {MAX_ROW_VALUES:,} columns of {self._file.path.name} are read")
        elif self._has_long_rows:
            reasons.append(f"{self._file.path.name} has rows with more cells than its heading; these are not read")
        return "; ".join(filter(None, reasons)) or None
