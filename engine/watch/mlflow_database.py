"""Read the runs in a database of MLflow, its default store since version 3.7: `mlflow.db`, with all experiments.

The table `metrics` has a row per value: `run_uuid`, `key`, `value`, `step`, and `timestamp` in milliseconds. The table
`params` has a row per parameter, and `runs` the name and the status of each run, in `experiments`. Source:
https://github.com/mlflow/mlflow/blob/master/mlflow/store/tracking/dbmodels/models.py. `database` opens the file.
"""

from __future__ import annotations

import math
import sqlite3
import sys
from pathlib import Path

from engine.watch.database import (
    MAX_RUNS,
    DatabaseRun,
    RunEntry,
    find_database_runs,
    has_tables,
    is_name,
    read_values,
)
from engine.watch.parameters import MAX_PARAMETERS, flatten, parse_scalar
from engine.watch.points import Point
from engine.watch.reading import MAX_NAME_LENGTH, Listing, Log, Reading, to_step, to_unix_time

# The newest ones that have a value.
_RUNS = """
SELECT runs.run_uuid, runs.name, experiments.name, runs.lifecycle_stage, runs.status, {parent} FROM runs
LEFT JOIN experiments ON experiments.experiment_id = runs.experiment_id
WHERE EXISTS (SELECT 1 FROM metrics WHERE metrics.run_uuid = runs.run_uuid) ORDER BY runs.rowid DESC LIMIT ?
"""
_PARENT = """
(SELECT coalesce(parents.name, parents.run_uuid) FROM tags JOIN runs AS parents ON parents.run_uuid = tags.value
 WHERE tags.run_uuid = runs.run_uuid AND tags."key" = 'mlflow.parentRunId')
"""
_STATE = "SELECT status FROM runs WHERE run_uuid = ?"
_PARAM_IDS = "SELECT rowid FROM params WHERE run_uuid = ? AND rowid > ? ORDER BY rowid LIMIT ?"
_PARAM = "SELECT key, value FROM params WHERE rowid = ?"
_ROW = "SELECT key, value, step, timestamp, is_nan FROM metrics WHERE rowid = ?"
END_STATES = ("FINISHED", "FAILED", "KILLED")
# Runs may have the same name. Those after the first one get a part of their ID.
ID_LENGTH = 8


def find(listing: Listing) -> list[Log]:
    """Return a log for each run in each database of a folder."""
    return find_database_runs(listing, MlflowDatabaseRun)


class MlflowDatabaseRun(DatabaseRun):
    """Follows one run in a database."""

    format = "mlflow"
    run_column = "run_uuid"

    def __init__(self, path: Path, run: str) -> None:
        super().__init__(path, run)
        self._last_param = -1

    @classmethod
    def read_runs(cls, database: sqlite3.Connection) -> dict[str, RunEntry]:
        runs: dict[str, RunEntry] = {}
        if not has_tables(database, "runs", "experiments"):
            return runs
        taken = set[str]()
        query = _RUNS.format(parent=_PARENT if has_tables(database, "tags") else "NULL")
        for run, name, experiment, stage, status, parent in reversed(database.execute(query, (MAX_RUNS,)).fetchall()):
            if not is_name(run):
                continue
            # A nested run is below its parent.
            parts = (experiment or "", *([parent] if is_name(parent) else []), name or run)
            label = "/".join(map(str, parts))[: MAX_NAME_LENGTH - ID_LENGTH - 1]
            if stage != "deleted":
                shown = f"{label}-{run[:ID_LENGTH]}" if label in taken else label
                runs[run] = RunEntry(shown, status in END_STATES)
            taken.add(label)
        return runs

    def restart(self) -> None:
        self._last_param = -1

    def read_run(self, database: sqlite3.Connection, reading: Reading) -> None:
        state = database.execute(_STATE, (self._run,)).fetchone()
        self._has_ended = state is not None and state[0] in END_STATES
        found = {}
        row_ids = database.execute(_PARAM_IDS, (self._run, self._last_param, MAX_PARAMETERS)).fetchall()
        for (row_id,) in row_ids:
            key, value = read_values(database, _PARAM, row_id) or ("", "")
            found[str(key)] = parse_scalar(str(value))
        reading.parameters = flatten(found)
        if row_ids:
            (self._last_param,) = row_ids[-1]

    def read_row(self, database: sqlite3.Connection, row_id: int, reading: Reading) -> int:
        key, value, step, timestamp, is_nan = read_values(database, _ROW, row_id) or (None,) * 5
        if not isinstance(key, str) or not isinstance(step, int) or not isinstance(value, int | float):
            return 0
        name, known = self._names.get(key), to_step(step)
        if name is not None and known is not None:
            time = to_unix_time(timestamp / 1000) if isinstance(timestamp, int) else None
            self._last_time = time or math.inf
            reading.points.append(Point(name, known, math.nan if is_nan else _value(value), None, time))
        return len(key)


def _value(stored: float) -> float:
    """Return a value, infinity for the largest number: MLflow stores the one as the other."""
    return math.copysign(math.inf, stored) if abs(stored) >= sys.float_info.max else float(stored)
