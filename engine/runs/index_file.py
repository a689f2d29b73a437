"""The stored index of a runs folder: rows of ended runs, in a file of the user's cache.

JSON lines: a header, then stamp and values of one run a line, with a checksum before them. Changes are appended, and
the last line of a run counts. 10,000 rows take 0.15 s to read. Lines need no lock, which a network file system may not
have. Programs that write at the same time can lose lines of each other, which
are then read from the runs again. The file is for display only, and one that is damaged is made anew.
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

from engine.runs.run_row import RunRow
from engine.utils.codec import ENTRIES, FileRecord, InvalidRecordError, decode, encode
from engine.utils.files import (
    append_to_file,
    cache_folder,
    make_user_folder,
    open_regular_file,
    replace_file,
    user_path_problem,
)

INDEX_FOLDER = "runs"
# 10,000 rows take 4 MB.
MAX_INDEX_BYTES = 1 << 28
# The file is rewritten when it has this many lines more than twice the runs.
SPARE_LINES = 200
MAX_UNUSED_SECONDS = 90 * 86_400.0
# Lines that are parsed at once. Meanwhile, 5 ms, no other thread runs.
LINES_PER_PARSE = 500

Stamp = tuple[int, ...]


class StoredRow(NamedTuple):
    """A row, and the stamp of the files that it was read from (`engine.runs.index.RunIndex`)."""

    stamp: Stamp
    row: RunRow


class _Header(FileRecord, frozen=True, kw_only=True):
    """First line: an index of another folder, or with other fields, is not used."""

    root: str
    fields: Annotated[tuple[str, ...], ENTRIES] = RunRow._fields


class IndexFile:
    """The index file of one runs folder."""

    def __init__(self, root: Path) -> None:
        self._root, self._shown_root = os.path.realpath(root), str(root)
        self._name = f"{INDEX_FOLDER}/{hashlib.sha256(os.fsencode(self._root)).hexdigest()[:32]}.jsonl"
        self._lines = 0
        """Number of lines in the file that are rows; 0 if it must be rewritten."""

    @property
    def path(self) -> Path:
        """Path of the index file."""
        return cache_folder() / self._name

    def load(self) -> dict[str, StoredRow]:
        """Return the stored rows by name; empty if there is no index, or none that can be used."""
        if user_path_problem(cache_folder(), self._name) is not None:
            return {}
        try:
            with open_regular_file(self.path, MAX_INDEX_BYTES) as file:
                header, *lines = file.read(MAX_INDEX_BYTES).split(b"\n")
        except OSError:
            return {}
        if header != self._header():
            return {}
        intact = [line[9:] for line in lines if _is_intact(line)]
        rows: dict[str, StoredRow] = {}
        for start in range(0, len(intact), LINES_PER_PARSE):
            # One array takes less time than a line each.
            with suppress(InvalidRecordError):
                # Unlike `parser`, it takes paths that are not UTF-8.
                for stored in decode(b"[%b]" % b",".join(intact[start : start + LINES_PER_PARSE]), list[StoredRow]):
                    name = stored.row.name
                    rows[name] = stored._replace(row=stored.row._replace(folder=f"{self._shown_root}/{name}"))
        self._lines = len(lines)
        return rows

    def save(self, rows: Mapping[str, StoredRow], changed: Collection[str], *, is_complete: bool) -> None:
        """Store the changed rows. If `is_complete`, `rows` are all of the folder. Errors are ignored: it is a cache."""
        with suppress(OSError):
            folder = make_user_folder(cache_folder(), INDEX_FOLDER)
            if self._lines and (not is_complete or self._lines + len(changed) <= 2 * len(rows) + SPARE_LINES):
                self._append({name: rows[name] for name in changed if name in rows})
                return
            lines = [_format_line(stored) for stored in rows.values()]
            replace_file(self.path, lambda file: self._write(file, lines))
            self._lines = len(lines) + 1
            _delete_unused(folder)

    def _append(self, rows: Mapping[str, StoredRow]) -> None:
        if not self.path.exists():
            self._lines = 0
            return
        handle = append_to_file(self.path)
        try:
            # One call, so that the lines of another program do not come between. The line before may be torn.
            os.write(handle, b"\n" + b"".join(_format_line(stored) for stored in rows.values()))
        finally:
            os.close(handle)
        self._lines += len(rows)

    def _write(self, file: BinaryIO, lines: list[bytes]) -> None:
        os.fchmod(file.fileno(), 0o600)
        file.write(self._header() + b"\n")
        file.writelines(lines)

    def _header(self) -> bytes:
        return encode(_Header(root=self._root))


def _format_line(stored: StoredRow) -> bytes:
    # The folder follows from the name.
    data = encode(stored._replace(row=stored.row._replace(folder="")))
    return b"%08x %b\n" % (zlib.crc32(data), data)


def _is_intact(line: bytes) -> bool:
    """Whether the checksum of a line is that of its data."""
    try:
        return len(line) > 9 and int(line[:8], 16) == zlib.crc32(line[9:])
    except ValueError:
        return False


def _delete_unused(folder: Path) -> None:
    """Delete the indexes of runs folders that nobody has listed for long, and leftovers of killed programs."""
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > MAX_UNUSED_SECONDS:
                path.unlink()
