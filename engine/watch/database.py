"""Read runs in SQLite databases: files that have several runs, with a table `metrics` for the rows of all of them.

`trackio` and `mlflow_database` add what is in a row. A database is opened as immutable
(https://www.sqlite.org/uri.html#uriimmutable): SQLite then takes no lock, and creates no `-shm` and no `-wal` file.
While a writer is connected, new rows may be only in a `-wal` file: then a private copy of both is opened.
"""

from __future__ import annotations

import math
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

from engine.base.files import file_size, find_file_stamp, read_bytes
from engine.watch.growing_file import read_head
from engine.watch.reading import MAX_NAME_LENGTH, POLL_BYTES, Listing, Log, MetricNames, Reading

MAGIC = b"SQLite format 3\0"
MAX_RUNS = 1000  # per database
MAX_VALUE_BYTES = 1 << 18
MAX_COPIED_BYTES = 1 << 26  # of a larger database, rows are seen after the next checkpoint
MAX_TRIES = 3
MIN_ROW_BYTES = 100  # of `max_bytes`, for each row of a poll
# A crafted database can make a query run for hours. 100 million instructions take two seconds, and read 8 million rows.
MAX_INSTRUCTIONS = 100_000_000
INSTRUCTIONS_PER_CALL = 100_000
# A view could run any query, and a virtual table, whose root page is 0, the code of an extension: they do not count.
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name = ?"
_HAS_COLUMN = "SELECT 1 FROM pragma_table_info('metrics') WHERE name = ?"
# Without an index of the run, a scan by `rowid` reads the rows after the last one only.
_NUM_ROWS = "SELECT count(*) FROM metrics WHERE {run} = ? AND rowid > ?"
_ROW_IDS = "SELECT rowid FROM metrics WHERE {run} = ? AND rowid > ? ORDER BY rowid LIMIT ?"
_HAS_ROW = "SELECT 1 FROM metrics WHERE {run} = ? AND rowid = ?"

_Stamp = tuple[int, int, int]


class RunEntry(NamedTuple):
    """What a database says of a run without its rows."""

    name: str
    has_ended: bool = False


class DatabaseRun:
    """Follows one run in the table `metrics` of a database. A format names the column that tells the runs apart."""

    format: ClassVar[str]
    run_column: ClassVar[str]

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        self._database = _database_at(path, type(self))
        self._names = MetricNames()
        self._stamp = (0, 0, 0)
        self._last_id = -1
        self._num_rows = self._total_rows = 0
        self._has_ended = self._was_read = False
        self._last_time = math.inf
        """Of the last row, in Unix seconds; infinite if it has none."""

    @classmethod
    def read_runs(cls, database: sqlite3.Connection) -> Mapping[str, RunEntry]:
        """Return each run, by what the column of the run has. Raises sqlite3.Error."""
        raise NotImplementedError

    def read_run(self, database: sqlite3.Connection, reading: Reading) -> None:
        """Read the parameters of the run, and whether it has ended. Raises sqlite3.Error."""
        raise NotImplementedError

    def read_row(self, database: sqlite3.Connection, row_id: int, reading: Reading) -> int:
        """Add the points of a row, and return how many bytes it has. Raises sqlite3.Error."""
        raise NotImplementedError

    def restart(self) -> None:
        """Forget what was read before the run was deleted, or the database replaced."""

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read new rows, at most one for each `MIN_ROW_BYTES` of `max_bytes`. Its bytes are the share of the rows."""
        reading = Reading()
        try:
            stamp = _stamp(self._path)
            is_partial = self._num_rows < self._total_rows
            if is_partial or stamp != self._stamp:
                with opened_database(self._path) as database:
                    self._restart_if_replaced(database, stamp, reading)
                    self._read(database, max(max_bytes // MIN_ROW_BYTES, 1), reading)
                self._note_change(stamp, reading)
            self._stamp = stamp
        except OSError as error:
            reading.problem = f"{self._path.name} cannot be read: {error.strerror}"
        except (sqlite3.Error, ValueError, OverflowError) as error:
            # It may be written at this moment: the next poll reads again.
            reading.problem = f"{self._path.name} cannot be read now: {error}"
        reading.has_ended = self._has_ended
        reading.total_bytes = self._stamp[1]
        share = self._num_rows / self._total_rows if self._total_rows else 1.0
        reading.read_bytes = int(share * reading.total_bytes)
        reading.problem = reading.problem or self._names.problem
        return reading

    def _note_change(self, stamp: _Stamp, reading: Reading) -> None:
        """Note when the run was last written. Rows that are new now were, whatever time they have."""
        if self._num_rows < self._total_rows:
            return
        if reading.points:
            written_at = stamp[2] / 1e9
            changed_at = written_at if self._was_read else min(self._last_time, written_at)
            self._database.note_change(self._run, changed_at)
        self._was_read = True

    def _restart_if_replaced(self, database: sqlite3.Connection, stamp: _Stamp, reading: Reading) -> None:
        is_replaced = stamp[0] != self._stamp[0]
        if self._num_rows and (is_replaced or not _has(database, self._sql(_HAS_ROW), self._run, self._last_id)):
            reading.drop_from = -math.inf
            self._last_id, self._num_rows = -1, 0
            self.restart()

    def _read(self, database: sqlite3.Connection, max_rows: int, reading: Reading) -> None:
        if not has_tables(database, "metrics"):
            raise sqlite3.DatabaseError("the table metrics is missing")
        new = database.execute(self._sql(_NUM_ROWS), (self._run, self._last_id)).fetchone()[0]
        self._total_rows = self._num_rows + new
        self.read_run(database, reading)
        num_bytes = 0
        for (row_id,) in database.execute(self._sql(_ROW_IDS), (self._run, self._last_id, max_rows)).fetchall():
            num_bytes += self.read_row(database, row_id, reading)
            self._last_id = row_id
            self._num_rows += 1
            if num_bytes > max_rows * MIN_ROW_BYTES:
                break

    @classmethod
    def _sql(cls, template: str) -> str:
        return template.format(run=cls.run_column)

    @classmethod
    def is_format_of(cls, database: sqlite3.Connection) -> bool:
        """Whether a database is of this format."""
        return has_tables(database, "metrics") and _has(database, _HAS_COLUMN, cls.run_column)


def find_database_runs(listing: Listing, kind: type[DatabaseRun]) -> list[Log]:
    """Return a log for each run in each database of a folder that is of a format."""
    return [
        log
        for name in listing.files
        if name.endswith(".db") and read_head(listing.folder / name, len(MAGIC)) == MAGIC
        for log in _logs(listing.folder / name, kind)
    ]


def _logs(path: Path, kind: type[DatabaseRun]) -> Iterator[Log]:
    database = _database_at(path, kind)
    for run, entry in database.runs().items():
        yield Log(
            kind.format,
            (path,),
            partial(kind, path, run),
            run=f"{path.stem}/{entry.name}",
            has_ended=entry.has_ended,
            changed_at=partial(database.changed_at, run),
        )


class _Database:
    """What all runs of a database share: which there are, and when each was last written."""

    def __init__(self, path: Path, kind: type[DatabaseRun]) -> None:
        self._path, self._kind = path, kind
        self._runs_stamp, self._runs = (0, 0, 0), dict[str, RunEntry]()
        self._changed = dict[str, float]()

    def runs(self) -> Mapping[str, RunEntry]:
        """Return the runs; those of before while it is written, and none if it cannot be read."""
        try:
            stamp = _stamp(self._path)
            if stamp[0] != self._runs_stamp[0]:
                self._runs_stamp, self._runs, self._changed = (stamp[0], 0, 0), {}, {}
            if stamp != self._runs_stamp:
                self._runs = self._read_runs()
                self._runs_stamp = stamp
        except sqlite3.Error:
            pass
        except (OSError, ValueError):
            return {}
        return self._runs

    def _read_runs(self) -> dict[str, RunEntry]:
        with opened_database(self._path) as database:
            if not self._kind.is_format_of(database):
                return {}
            runs = self._kind.read_runs(database)
        return {run: entry for run, entry in runs.items() if is_name(run) and is_name(entry.name)}

    def note_change(self, run: str, changed_at: float) -> None:
        """Note when a run was last written."""
        self._changed[run] = max(changed_at, self._changed.get(run, 0.0))

    def changed_at(self, run: str) -> float:
        """Return when a run was last written; until it has been read, when the database was. 0 without a database."""
        try:
            written_at = self._path.lstat().st_mtime
        except OSError:
            return 0.0
        return min(self._changed.get(run, written_at), written_at)


@lru_cache(maxsize=64)
def _database_of(path: Path, kind: type[DatabaseRun]) -> _Database:
    return _Database(path, kind)


def _database_at(path: Path, kind: type[DatabaseRun]) -> _Database:
    return _database_of(path, kind)  # type: ignore[arg-type]  # a class is hashable


def _stamp(path: Path) -> _Stamp:
    """Return what changes when the database or its write-ahead log does. Raises OSError."""
    status = path.lstat()
    log = find_file_stamp(_write_ahead_log(path))
    return status.st_ino, status.st_size + (0 if log is None else log[1]), max(status.st_mtime_ns, log[2] if log else 0)


@contextmanager
def opened_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database that is never written to or locked. Raises OSError, sqlite3.Error, ValueError."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(22, "is not a regular file", str(path))
    with ExitStack() as stack:
        if file_size(_write_ahead_log(path)) and file_size(path) <= MAX_COPIED_BYTES:
            database = stack.enter_context(_opened_copy(path))
        else:
            database = stack.enter_context(closing(_connect(path, "mode=ro&immutable=1")))
        calls = iter(range(MAX_INSTRUCTIONS // INSTRUCTIONS_PER_CALL))
        database.set_progress_handler(lambda: next(calls, None) is None, INSTRUCTIONS_PER_CALL)
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA cache_size = -4000")
        # Invalid UTF-8 is replaced.
        database.text_factory = lambda data: data.decode(errors="replace")
        yield database


def _connect(path: Path, options: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?{options}"
    return sqlite3.connect(uri, uri=True, timeout=0, check_same_thread=False)


class _Copy:
    """The copy of the database that was opened last, which serves all of its runs until the database changes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.key: tuple[Path, _Stamp] | None = None
        self.database: sqlite3.Connection | None = None


_COPY = _Copy()


@contextmanager
def _opened_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a copy of a database and its write-ahead log, whose files are gone once they are open."""
    with _COPY.lock:
        key = path, _stamp(path)
        if _COPY.database is None or _COPY.key != key:
            if _COPY.database is not None:
                _COPY.database.close()
            _COPY.database = None
            with TemporaryDirectory(prefix="gputrain-", ignore_cleanup_errors=True) as folder:
                database = _connect(_copied(path, Path(folder)), "mode=rw")
                # It opens the log, too.
                database.execute("SELECT 1 FROM sqlite_master").fetchone()
            _COPY.key, _COPY.database = key, database
        yield _COPY.database


def _write_ahead_log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _copied(path: Path, folder: Path) -> Path:
    """Copy a database and its write-ahead log into a folder of its own. Raises OSError."""
    for _ in range(MAX_TRIES):
        before = find_file_stamp(path)
        for each in (path, _write_ahead_log(path)):
            data = read_bytes(each, MAX_COPIED_BYTES)
            (folder / f"database{each.name.removeprefix(path.name)}").write_bytes(data)
        # A checkpoint between the two mixes pages of two times.
        if find_file_stamp(path) == before:
            return folder / "database"
    raise sqlite3.OperationalError("it is being written")


def has_tables(database: sqlite3.Connection, *names: str) -> bool:
    """Whether all of the tables exist. Raises sqlite3.Error."""
    return all(_has(database, _HAS_TABLE, name) for name in names)


def _has(database: sqlite3.Connection, query: str, *values: str | int) -> bool:
    return database.execute(query, values).fetchone() is not None


def read_values(database: sqlite3.Connection, query: str, row_id: int) -> tuple[Any, ...] | None:
    """Return the columns of a row by its ID, None if one is longer than `MAX_VALUE_BYTES`. Raises sqlite3.Error."""
    try:
        row: tuple[Any, ...] | None = database.execute(query, (row_id,)).fetchone()
    except sqlite3.DataError:
        return None
    if row is None:
        # An index had it: another page of the database is older.
        raise sqlite3.DatabaseError("it is being written")
    return row


def is_name(value: object) -> bool:
    """Whether a value can be the name of a run."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_LENGTH
