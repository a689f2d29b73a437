"""Read metrics from files with a JSON object per line.

Such files are written by trainers of their own, by MMEngine (`scalars.json`), Detectron2 (`metrics.json`) and those
that follow DeiT (`log.txt`). Format: https://jsonlines.org
"""

from __future__ import annotations

from pathlib import Path

from engine.foreign.growing_file import MAX_LINE_BYTES, RowFile, head_lines
from engine.foreign.line_names import source_of_row, with_source
from engine.foreign.reading import (
    MAX_SNIFFED_FILES,
    SNIFFED_BYTES,
    Columns,
    Listing,
    Log,
    Reading,
    flat_numbers,
    parse_json_object,
)

ENDINGS = (".jsonl", ".ndjson", ".log.json")
KNOWN_NAMES = frozenset({"metrics.json", "scalars.json", "log.json", "log.txt"})


def find(listing: Listing) -> list[Log]:
    """Return a log for each file whose first line is an object with a step or an epoch, and another number."""
    names = [name for name in listing.files if name.endswith(ENDINGS) or name in KNOWN_NAMES]
    paths = [listing.folder / name for name in names[:MAX_SNIFFED_FILES]]
    return [_log(path) for path in paths if is_log(path)]


def _log(path: Path) -> Log:
    return Log("json", (path,), lambda: JsonLines(path), open_until=lambda sizes: JsonLines(path, sizes.get(path)))


def is_log(path: Path) -> bool:
    """Whether one of the first two lines has a step or an epoch, and another number.

    MMEngine's first line may be the configuration.
    """
    for line in head_lines(path, SNIFFED_BYTES)[:2]:
        numbers = flat_numbers(parse_json_object(line) or {})
        columns = Columns.find(numbers)
        if len(numbers) > 1 and (columns.step or columns.epoch):
            return True
    return False


class JsonLines(RowFile):
    """Follows one file of JSON lines. Lines that are no JSON objects are passed over."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        super().__init__(path, limit)
        self._rank: float | None = None

    def read(self, max_bytes: int, reading: Reading) -> None:
        # At least the longest line that is read.
        for line in self._file.read_lines(max(max_bytes, MAX_LINE_BYTES)):
            found = parse_json_object(line)
            self._num_damaged += found is None and line.lstrip().startswith(b"{")
            row = flat_numbers(found or {})
            rank = row.get("rank")
            self._rank = rank if self._rank is None else self._rank
            # Of several ranks, the lines of the first one count.
            if row and rank == self._rank:
                source = source_of_row(found or {})
                columns = Columns.find(row)
                named = {name if name in columns else with_source(name, source): value for name, value in row.items()}
                self.add_row(named if source else row, columns, reading)
