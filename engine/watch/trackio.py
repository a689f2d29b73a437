"""Read the runs in a database of trackio: one SQLite file per project.

The table `metrics` has a row per call of `log`, with `run_name`, `timestamp` (ISO 8601), `step` and a JSON object; the
table `configs` has a JSON object per run. Source: `sqlite_storage.py` in https://github.com/gradio-app/trackio.
`database` opens the file.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime

from engine.watch.database import MAX_RUNS, DatabaseRun, RunEntry, find_database_runs, has_tables, read_values
from engine.watch.parameters import flatten, without_wandb_keys
from engine.watch.reading import Columns, Listing, Log, Reading, flat_numbers, parse_json_object, row_points, to_step

_RUNS = "SELECT DISTINCT run_name FROM metrics LIMIT ?"
_ROW = "SELECT timestamp, step, metrics FROM metrics WHERE rowid = ?"
_CONFIG = "SELECT config FROM configs WHERE run_name = ? ORDER BY id DESC LIMIT 1"


def find(listing: Listing) -> list[Log]:
    """Return a log for each run in each database of a folder."""
    return find_database_runs(listing, TrackioRun)


class TrackioRun(DatabaseRun):
    """Follows one run in a database."""

    format = "trackio"
    run_column = "run_name"

    @classmethod
    def read_runs(cls, database: sqlite3.Connection) -> dict[str, RunEntry]:
        return {name: RunEntry(name) for (name,) in database.execute(_RUNS, (MAX_RUNS,))}

    def read_run(self, database: sqlite3.Connection, reading: Reading) -> None:
        if self._last_id < 0 and has_tables(database, "configs"):
            for (config,) in database.execute(_CONFIG, (self._run,)):
                reading.parameters = flatten(without_wandb_keys(_json_object(config)))

    def read_row(self, database: sqlite3.Connection, row_id: int, reading: Reading) -> int:
        timestamp, step, metrics = read_values(database, _ROW, row_id) or (None, None, None)
        row = flat_numbers(_json_object(metrics))
        if isinstance(step, int) and (known := to_step(step)) is not None:
            row["step"] = known
        if (time := _unix_time(timestamp)) is not None:
            row["_timestamp"] = self._last_time = time
        reading.points.extend(row_points(row, Columns.find(row), self._num_rows, self._names))
        return len(metrics) if isinstance(metrics, str | bytes) else 0


def _json_object(value: object) -> dict[str, object]:
    return (parse_json_object(value) if isinstance(value, str | bytes) else None) or {}


def _unix_time(text: object) -> float | None:
    try:
        time = datetime.fromisoformat(text) if isinstance(text, str) else None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() if time else None
    except (ValueError, OverflowError):
        return None
