"""Read metrics from CSV files that grow, or that are rewritten whole.

The first line names the columns. Lightning's `CSVLogger` leaves cells empty and rewrites `metrics.csv` when a column is
added, ultralytics' `results.csv` has blanks around names and numbers, timm's `summary.csv` repeats its heading when a
run is resumed, and Keras' `CSVLogger` may separate with any character (https://keras.io/api/callbacks/csv_logger/).
"""

from __future__ import annotations

import csv
from pathlib import Path

from engine.foreign.growing_file import RowFile, head_lines
from engine.foreign.line_names import source_of_row, with_source
from engine.foreign.reading import (
    MAX_ROW_VALUES,
    MAX_SNIFFED_FILES,
    SNIFFED_BYTES,
    Columns,
    Listing,
    Log,
    Reading,
    parse_cell,
)

# Of other CSV files the heading decides: a data set is no log.
KNOWN_NAMES = frozenset({"metrics.csv", "results.csv", "summary.csv", "training.csv", "progress.csv", "monitor.csv"})
_DELIMITERS = ",;\t"
COMMENT = b"#"


def find(listing: Listing) -> list[Log]:
    """Return a log for each CSV file that has a known name, or a column with steps or epochs."""
    named = [name for name in listing.files if name.endswith((".csv", ".tsv"))]
    known = [name for name in named if _is_known(name)]
    others = [name for name in named if not _is_known(name)][:MAX_SNIFFED_FILES]
    paths = [listing.folder / name for name in known]
    paths += [path for path in (listing.folder / name for name in others) if is_log(path)]
    return [_log(path) for path in paths]


def _is_known(name: str) -> bool:
    # `0.monitor.csv`
    return name in KNOWN_NAMES or ".".join(name.split(".")[-2:]) in KNOWN_NAMES


def _log(path: Path) -> Log:
    return Log("csv", (path,), lambda: CsvFile(path), open_until=lambda sizes: CsvFile(path, sizes.get(path)))


def is_log(path: Path) -> bool:
    """Whether the heading of a CSV file has a column with steps or epochs, and another one."""
    lines = (line for line in head_lines(path, SNIFFED_BYTES) if not line.startswith(COMMENT))
    heading = split_row(next(lines, b""))[0]
    columns = Columns.find(heading)
    return len(heading) > 1 and bool(columns.step or columns.epoch)


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

    def __init__(self, path: Path, limit: int | None = None) -> None:
        super().__init__(path, limit)
        self._heading: list[str] = []
        self._is_cut = self._has_long_rows = False
        self._columns = Columns(None, None, None)
        self._delimiter = ""

    def restart(self) -> None:
        self._heading = []

    def read(self, max_bytes: int, reading: Reading) -> None:
        for line in self._file.read_lines(max_bytes):
            self._read_row(line, reading)

    def _read_row(self, line: bytes, reading: Reading) -> None:
        if not self._heading:
            if not line.startswith(COMMENT):
                heading, self._delimiter = split_row(line)
                self._set_heading(heading)
            return
        cells, _ = split_row(line, self._delimiter)
        has_decimal_commas = self._delimiter != ","
        row = {}
        for name, cell in zip(self._heading, cells, strict=False):
            if cell and name and (number := parse_cell(cell, decimal_commas=has_decimal_commas)) is not None:
                row[name] = number
        if row:
            self._has_long_rows = self._has_long_rows or len(cells) > len(self._heading)
            if source := source_of_row(dict(zip(self._heading, cells, strict=False))):
                row = {name if name in self._columns else with_source(name, source): row[name] for name in row}
            self.add_row(row, self._columns, reading)
        elif any(Columns.find(cells)[:2]):
            # A resumed run writes a heading again, maybe with other columns.
            self._set_heading(cells)
            self._restarts.expect()

    def _set_heading(self, cells: list[str]) -> None:
        self._is_cut = len(cells) > MAX_ROW_VALUES
        self._heading = cells[:MAX_ROW_VALUES]
        self._columns = Columns.find(self._heading)

    @property
    def problem(self) -> str | None:
        reasons = [super().problem]
        if self._is_cut:
            reasons.append(f"only the first {MAX_ROW_VALUES:,} columns of {self._file.path.name} are read")
        elif self._has_long_rows:
            reasons.append(f"{self._file.path.name} has rows with more cells than its heading; these are not read")
        return "; ".join(filter(None, reasons)) or None
