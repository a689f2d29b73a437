"""Read the runs in a database of trackio: one SQLite file per project.

The table `metrics` has a row per call of `log`, with `run_name`, `timestamp` (ISO 8601), `step` and a JSON object; the
table `configs` has a JSON object per run. Source: `sqlite_storage.py` in https://github.com/gradio-app/trackio.

The database is opened as immutable (https://www.sqlite.org/uri.html#uriimmutable): SQLite then takes no lock, and
creates no `-shm` and no `-wal` file. What is only in a `-wal` file is seen after the next checkpoint: SQLite makes one
when trackio closes its connection after each write.
"""

from __future__ import annotations

import math
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from engine.foreign.growing_file import read_head
from engine.foreign.parameters import flatten, without_wandb_keys
from engine.foreign.reading import (
    MAX_NAME_LENGTH,
    POLL_BYTES,
    Columns,
    Listing,
    Log,
    MetricNames,
    Reading,
    flat_numbers,
    parse_json_object,
    row_points,
    to_step,
)

MAGIC = b"SQLite format 3\0"
MAX_RUNS = 1000  # per database
MAX_VALUE_BYTES = 1 << 18
MIN_ROW_BYTES = 100  # of `max_bytes`, for each row of a poll
# A crafted database can make a query run for hours. 100 million instructions take two seconds, and read 8 million rows.
MAX_INSTRUCTIONS = 100_000_000
_INSTRUCTIONS_PER_CALL = 100_000
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name IN ('metrics', 'configs') LIMIT 2"
_RUNS = "SELECT DISTINCT run_name FROM metrics LIMIT ?"
# Without an index of `run_name`, a scan by `id` reads the rows after the last one only.
_NUM_ROWS = "SELECT count(*) FROM metrics WHERE run_name = ? AND id > ?"
_HAS_ROW = "SELECT 1 FROM metrics WHERE run_name = ? AND id = ?"
_ROW_IDS = "SELECT id FROM metrics WHERE run_name = ? AND id > ? ORDER BY id LIMIT ?"
_ROW = "SELECT timestamp, step, metrics FROM metrics WHERE id = ?"
_CONFIG = "SELECT config FROM configs WHERE run_name = ? ORDER BY id DESC LIMIT 1"


def find(listing: Listing) -> list[Log]:
    """Return a log for each run in each database of a folder."""
    return [
        log
        for name in listing.files
        if name.endswith(".db") and read_head(listing.folder / name, len(MAGIC)) == MAGIC
        for log in _logs(listing.folder / name)
    ]


def _logs(path: Path) -> Iterator[Log]:
    for name in _database_at(path).run_names():
        yield Log("trackio", (path,), lambda name=name: TrackioRun(path, name), run=f"{path.stem}/{name}")  # type: ignore[misc]


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


class _Database:
    """The names of the runs in a database. They take a scan of the table, and a list of runs asks every few seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = (0, 0, 0)
        self._names: tuple[str, ...] = ()

    def run_names(self) -> tuple[str, ...]:
        """Return the names; those of before while trackio writes, and none if the database cannot be read."""
        try:
            stamp = _stamp(self._path.lstat())
            if stamp[0] != self._stamp[0]:
                self._stamp, self._names = (stamp[0], 0, 0), ()
            if stamp != self._stamp:
                self._names = _read_run_names(self._path)
                self._stamp = stamp
        except sqlite3.Error:
            pass
        except (OSError, ValueError):
            return ()
        return self._names


_database_at = lru_cache(maxsize=64)(_Database)


def _read_run_names(path: Path) -> tuple[str, ...]:
    """Return the names of the runs in a database. Raises OSError, sqlite3.Error, ValueError."""
    with opened_database(path) as database:
        if "metrics" not in _tables(database):
            return ()
        names = [row[0] for row in database.execute(_RUNS, (MAX_RUNS,))]
    return tuple(name for name in names if isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH)


@contextmanager
def opened_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database that is never written to or locked. Raises OSError, sqlite3.Error, ValueError."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(22, "is not a regular file", str(path))
    uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    with closing(sqlite3.connect(uri, uri=True, timeout=0)) as database:
        calls = iter(range(MAX_INSTRUCTIONS // _INSTRUCTIONS_PER_CALL))
        database.set_progress_handler(lambda: next(calls, None) is None, _INSTRUCTIONS_PER_CALL)
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA cache_size = -4000")
        # Invalid UTF-8 is replaced.
        database.text_factory = lambda data: data.decode(errors="replace")
        yield database


def _tables(database: sqlite3.Connection) -> set[str]:
    """Return which of the tables exist. A view could run any query, so it does not count."""
    return {row[0] for row in database.execute(_TABLES)}


class TrackioRun:
    """Follows one run in a database."""

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        self._names = MetricNames()
        self._stamp = (0, 0, 0)
        self._last_id = -1
        self._num_rows = self._total_rows = 0

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read new rows, at most one for each `MIN_ROW_BYTES` of `max_bytes`. Its bytes are the share of the rows."""
        reading = Reading()
        try:
            stamp = _stamp(self._path.lstat())
            if stamp != self._stamp or self._num_rows < self._total_rows:
                with opened_database(self._path) as database:
                    self._restart_if_replaced(database, stamp, reading)
                    self._read(database, max(max_bytes // MIN_ROW_BYTES, 1), reading)
                self._stamp = stamp
        except OSError as error:
            reading.problem = f"{self._path.name} cannot be read: {error.strerror}"
        except (sqlite3.Error, ValueError, OverflowError) as error:
            # trackio may be writing: the next poll reads again.
            reading.problem = f"{self._path.name} cannot be read now: {error}"
        reading.total_bytes = self._stamp[1]
        share = self._num_rows / self._total_rows if self._total_rows else 1.0
        reading.read_bytes = int(share * reading.total_bytes)
        reading.problem = reading.problem or self._names.problem
        return reading

    def _restart_if_replaced(self, database: sqlite3.Connection, stamp: tuple[int, int, int], reading: Reading) -> None:
        """Start over if the run was deleted, or the database replaced."""
        if self._num_rows and (
            stamp[0] != self._stamp[0] or database.execute(_HAS_ROW, (self._run, self._last_id)).fetchone() is None
        ):
            reading.drop_from = -math.inf
            self._last_id, self._num_rows = -1, 0

    def _read(self, database: sqlite3.Connection, max_rows: int, reading: Reading) -> None:
        tables = _tables(database)
        if "metrics" not in tables:
            raise sqlite3.DatabaseError("the table metrics is missing")
        self._total_rows = self._num_rows + database.execute(_NUM_ROWS, (self._run, self._last_id)).fetchone()[0]
        if "configs" in tables and self._last_id < 0:
            for (config,) in database.execute(_CONFIG, (self._run,)):
                reading.parameters = flatten(without_wandb_keys(_json_object(config)))
        num_bytes = 0
        for (row_id,) in database.execute(_ROW_IDS, (self._run, self._last_id, max_rows)).fetchall():
            try:
                timestamp, step, metrics = database.execute(_ROW, (row_id,)).fetchone()
            except sqlite3.DataError:  # longer than MAX_VALUE_BYTES
                timestamp = step = metrics = None
            row = flat_numbers(_json_object(metrics))
            if isinstance(step, int) and (known := to_step(step)) is not None:
                row["step"] = known
            if (time := _unix_time(timestamp)) is not None:
                row["_timestamp"] = time
            reading.points.extend(row_points(row, Columns.find(row), self._num_rows, self._names))
            self._last_id = row_id
            self._num_rows += 1
            num_bytes += len(metrics) if isinstance(metrics, str | bytes) else 0
            if num_bytes > max_rows * MIN_ROW_BYTES:
                break


def _json_object(value: object) -> dict[str, object]:
    return (parse_json_object(value) if isinstance(value, str | bytes) else None) or {}


def _unix_time(text: object) -> float | None:
    try:
        time = datetime.fromisoformat(text) if isinstance(text, str) else None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() if time else None
    except (ValueError, OverflowError):
        return None
