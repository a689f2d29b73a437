"""Databases of MLflow: its schema, several runs, a writer that is at work, and crafted values."""

from __future__ import annotations

import math
import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from engine.watch import database as database_module
from engine.watch.activity import Activity
from engine.watch.folders import find_runs
from engine.watch.mlflow_database import MlflowDatabaseRun
from engine.watch.process import ProcessId, find_process_runs, read_tree
from engine.watch.run_list import ForeignRunList
from support.foreign import opened, values_of

# The columns of MLflow 3.17 that are read, and its indices of `metrics`.
SCHEMA = """
CREATE TABLE experiments (experiment_id INTEGER NOT NULL PRIMARY KEY, name VARCHAR(256) NOT NULL);
CREATE TABLE runs (run_uuid VARCHAR(32) NOT NULL PRIMARY KEY, name VARCHAR(250), status VARCHAR(9),
    lifecycle_stage VARCHAR(20), experiment_id INTEGER);
CREATE TABLE params ("key" VARCHAR(250) NOT NULL, value VARCHAR(8000) NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    PRIMARY KEY ("key", run_uuid));
CREATE TABLE metrics ("key" VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL,
    run_uuid VARCHAR(32) NOT NULL, step BIGINT DEFAULT '0' NOT NULL, is_nan BOOLEAN DEFAULT '0' NOT NULL,
    PRIMARY KEY ("key", timestamp, step, run_uuid, value, is_nan));
CREATE INDEX index_metrics_run_uuid ON metrics (run_uuid);
CREATE INDEX index_metrics_run_uuid_key_step ON metrics (run_uuid, "key", step);
INSERT INTO experiments VALUES (1, 'flowers');
"""
TIME_MS = 1_800_000_000_500


def make_database(path: Path, *runs: str) -> Path:
    """Make a database with runs, which have the same name as their ID."""
    with opened(path) as database:
        database.executescript(SCHEMA)
        for run in runs:
            add_run(database, run, run)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_database(tmp_path / "m.db", "a")


def add_run(database: sqlite3.Connection, run: str, name: str, stage: str = "active") -> None:
    database.execute("INSERT INTO runs VALUES (?, ?, 'RUNNING', ?, 1)", (run, name, stage))
    log(database, run, 0, 1.0)


def log(database: sqlite3.Connection, run: str, step: int, value: object, key: str = "loss", is_nan: int = 0) -> None:
    database.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", (key, value, TIME_MS, run, step, is_nan))


def listed(listing: ForeignRunList) -> dict[str, Activity]:
    """Return what each run does once all that is new has been read."""
    for _ in range(2):
        listing._next_check = 0.0
        listing.poll(1.0)
    return {run.run.name[-1]: run.activity for run in listing.runs}


def test_find_tells_runs_of_one_name_apart_and_leaves_out_deleted_ones(tmp_path: Path) -> None:
    with opened(make_database(tmp_path / "m.db")) as database:
        for run, name, stage in [
            ("0123456789", "tiny", "deleted"), ("1123456789", "tiny", "active"), ("2123456789", "", "active"),
        ]:  # fmt: skip
            add_run(database, run, name, stage)
        database.execute("INSERT INTO runs VALUES ('b', 'without values', 'RUNNING', 'active', 1)")
    names = [run.name.removeprefix(f"{tmp_path.name}/m/flowers/") for run in find_runs(tmp_path).runs]
    assert names == ["2123456789", "tiny-11234567"]


def test_nested_run_is_named_below_its_parent(tmp_path: Path) -> None:
    with opened(make_database(tmp_path / "m.db")) as database:
        database.execute("CREATE TABLE tags (key VARCHAR(250), value VARCHAR(5000), run_uuid VARCHAR(32))")
        add_run(database, "a", "sweep")
        add_run(database, "b", "trial")
        database.execute("INSERT INTO tags VALUES ('mlflow.parentRunId', 'a', 'b')")
    names = [run.name.removeprefix(f"{tmp_path.name}/m/flowers/") for run in find_runs(tmp_path).runs]
    assert names == ["sweep", "sweep/trial"]


def test_mlflow_database_run_has_ended_until_it_is_resumed(path: Path) -> None:
    source = MlflowDatabaseRun(path, "a")
    for status, has_ended in (("RUNNING", False), ("FINISHED", True), ("RUNNING", False), ("FAILED", True)):
        with opened(path) as database:
            database.execute("UPDATE runs SET status = ?", (status,))
        assert source.poll().has_ended == has_ended
        assert source.poll().has_ended == has_ended


def test_mlflow_database_run_reads_values_that_sql_has_no_number_for(path: Path) -> None:
    with opened(path) as database:
        log(database, "a", 1, sys.float_info.max)
        log(database, "a", 2, -sys.float_info.max)
        log(database, "a", 3, 0.0, is_nan=1)
    values = [value for _, value in values_of(MlflowDatabaseRun(path, "a").poll().points, "loss")]
    assert values[:3] == [1.0, math.inf, -math.inf]
    assert math.isnan(values[3])


def test_mlflow_database_run_passes_over_what_is_no_value(path: Path) -> None:
    huge = "x" * (database_module.MAX_VALUE_BYTES + 1)
    with opened(path) as database:
        log(database, "a", 1, "text")
        log(database, "a", 2, 0.5, key=huge)
        log(database, "a", 2**63 - 1, 0.5)
        log(database, "a", 3, 0.25)
        database.executemany("INSERT INTO params VALUES (?, ?, 'a')", [("huge", huge), ("\x1b[31m", "red")])
    reading = MlflowDatabaseRun(path, "a").poll()
    assert values_of(reading.points, "loss") == [(0, 1.0), (3, 0.25)]
    assert (reading.parameters, reading.share, reading.problem) == ({"\\x1b[31m": "red"}, 1.0, None)


def test_mlflow_database_run_starts_over_when_database_is_replaced(tmp_path: Path, path: Path) -> None:
    source = MlflowDatabaseRun(path, "a")
    source.poll()
    make_database(tmp_path / "other.db", "a").replace(path)
    with opened(path) as database:
        database.execute("INSERT INTO params VALUES ('lr', '0.1', 'a')")
    reading = source.poll()
    assert (reading.drop_from, reading.parameters) == (-math.inf, {"lr": 0.1})
    assert values_of(reading.points, "loss") == [(0, 1.0)]


def test_list_tells_which_run_of_database_grows(tmp_path: Path) -> None:
    path = make_database(tmp_path / "m.db", "a", "b", "c")
    with opened(path) as database:
        hour_ago = int((time.time() - 3600) * 1000)
        database.execute("UPDATE metrics SET timestamp = ? WHERE run_uuid <> 'b'", (hour_ago,))
    listing = ForeignRunList(lambda: iter([find_runs(tmp_path)]))
    assert listed(listing) == {"a": Activity.QUIET, "b": Activity.GROWING, "c": Activity.QUIET}
    with opened(path) as database:
        database.execute("INSERT INTO metrics VALUES ('loss', 0.5, ?, 'c', 1, 0)", (hour_ago,))
    assert listed(listing) == {"a": Activity.QUIET, "b": Activity.GROWING, "c": Activity.GROWING}


def test_process_writes_the_runs_of_its_database_that_have_not_ended(tmp_path: Path) -> None:
    path = make_database(tmp_path / "m.db", "a", "b", "c")
    with opened(path) as database:
        database.execute("UPDATE runs SET status = 'FINISHED' WHERE run_uuid <> 'b'")
        database.commit()
        process = ProcessId.find(os.getpid())
        assert process is not None
        tree = read_tree(process)
        assert tree is not None
        found = find_process_runs(tree, 0.0).runs
    assert [run.name[-1] for run in found if run.folder == tmp_path] == ["b"]


def test_database_without_a_table_of_mlflow_has_no_run(tmp_path: Path, path: Path) -> None:
    with opened(path) as database:
        database.execute("DROP TABLE experiments")
    assert find_runs(tmp_path).runs == ()
    with opened(path) as database:
        database.execute("DROP TABLE runs")
    assert MlflowDatabaseRun(path, "a").poll().problem


def test_virtual_table_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    with opened(path) as database:
        database.executescript(SCHEMA)
        database.execute("DROP TABLE metrics")
        database.execute("CREATE VIRTUAL TABLE metrics USING fts5(key, value, timestamp, run_uuid, step, is_nan)")
        add_run(database, "a", "a")
    assert find_runs(tmp_path).runs == ()
    assert MlflowDatabaseRun(path, "a").poll().problem
