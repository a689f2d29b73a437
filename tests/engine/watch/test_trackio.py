"""Databases of trackio: its schema, several runs, a writer that is at work, and crafted databases."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from engine.watch import database as database_module
from engine.watch import trackio
from engine.watch.folders import find_runs
from engine.watch.points import Point
from engine.watch.reading import list_folder
from engine.watch.trackio import TrackioRun
from support.foreign import opened, points_of, values_of

# The two tables that trackio 0.43 makes; the first versions had no `run_id`.
METRICS = """CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL,
run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL, log_id TEXT, space_id TEXT)"""
CONFIGS = """CREATE TABLE configs (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, run_name TEXT NOT NULL,
config TEXT NOT NULL, created_at TEXT NOT NULL, UNIQUE(run_id))"""
TIME = "2027-01-15T08:00:00+00:00"
UNIX_TIME = 1800000000.0


def make_database(path: Path) -> Path:
    with opened(path) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(METRICS)
        database.execute(CONFIGS)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_database(tmp_path / "p.db")


def log(database: sqlite3.Connection, run: str, step: int, values: dict[str, Any]) -> None:
    row = (run, TIME, run, step, json.dumps(values).encode())
    database.execute("INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?, ?)", row)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_find_returns_each_run_of_project(tmp_path: Path) -> None:
    with opened(make_database(tmp_path / "flowers.db")) as database:
        for run in ("warm-sky-1", "cold-sea-2"):
            log(
                database, run, 3, {"loss": 0.5, "val": {"acc": 0.25}, "bad": "NaN", "image": {"_type": "trackio.image"}}
            )
            config = json.dumps({"lr": 0.1, "model": {"width": 8}, "_Username": None, "_Created": TIME})
            database.execute("INSERT INTO configs VALUES (NULL, ?, ?, ?, ?)", (run, run, config, TIME))
    runs = find_runs(tmp_path).runs
    assert [run.name for run in runs] == [f"{tmp_path.name}/flowers/{name}" for name in ("cold-sea-2", "warm-sky-1")]
    reading = runs[0].logs[0].open().poll()
    assert reading.parameters == {"lr": 0.1, "model.width": 8}
    assert reading.points[:2] == [Point("loss", 3, 0.5, None, UNIX_TIME), Point("val.acc", 3, 0.25, None, UNIX_TIME)]
    assert [point.name for point in reading.points[2:]] == ["bad"]


def test_trackio_run_follows_growth_and_creates_no_file(tmp_path: Path, path: Path) -> None:
    source = TrackioRun(path, "a")
    for step in range(3):
        with opened(path) as database:
            log(database, "a", step, {"loss": step})
        assert source.poll().points == [Point("loss", step, float(step), None, UNIX_TIME)]
        assert list(contents(tmp_path)) == ["p.db"]
    assert source.poll().points == []


def test_trackio_run_reads_rows_of_an_open_database_and_changes_none_of_its_files(tmp_path: Path, path: Path) -> None:
    source = TrackioRun(path, "a")
    with opened(path) as database:
        log(database, "a", 1, {"loss": 1})
        database.commit()
        files = contents(tmp_path)
        assert values_of(source.poll().points, "loss") == [(1, 1.0)]
        assert contents(tmp_path) == files
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert source.poll().points == []


def test_trackio_run_reads_many_rows_in_parts(path: Path) -> None:
    with opened(path) as database:
        for step in range(5000):
            log(database, "a", step, {"loss": step})
            log(database, "b", step, {"loss": -step})
    source = TrackioRun(path, "a")
    first = source.poll(100_000)
    assert 0.1 < first.share < 0.3
    points = [*first.points, *points_of(source, 100_000)]
    assert values_of(points, "loss") == [(step, float(step)) for step in range(5000)]


def test_crafted_database_neither_hangs_nor_runs_view(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"
    columns = "x AS id, '' AS timestamp, 0 AS step, '{}' AS metrics, 'a' AS run_name"
    path = tmp_path / "view.db"
    with opened(path) as database:
        database.execute(f"CREATE VIEW metrics AS SELECT {columns} FROM ({endless})")  # noqa: S608
    started = time.monotonic()
    assert trackio.find(list_folder(tmp_path)) == []
    assert TrackioRun(path, "a").poll().problem
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0" + bytes(200), b"text"])
def test_damaged_database_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.db"
    path.write_bytes(content)
    assert trackio.find(list_folder(tmp_path)) == []
    assert TrackioRun(path, "a").poll().problem


def test_trackio_run_opens_no_pipe_and_follows_no_link(tmp_path: Path, path: Path) -> None:
    with opened(path) as database:
        log(database, "a", 1, {"loss": 1})
    link, pipe = tmp_path / "link.db", tmp_path / "pipe.db"
    link.symlink_to(path)
    os.mkfifo(pipe)
    for other in (link, pipe, tmp_path / "missing.db"):
        reading = TrackioRun(other, "a").poll()
        assert (reading.points, reading.problem is None) == ([], False)


def test_runs_stay_while_database_is_written(tmp_path: Path, path: Path) -> None:
    with opened(path) as database:
        log(database, "a", 1, {"loss": 1})
    (run,) = find_runs(tmp_path).runs
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:100] + bytes(len(content) - 100))
    assert [found.name for found in find_runs(tmp_path).runs] == [run.name]
    damaged = tmp_path / "damaged"
    damaged.write_bytes(content[:100] + bytes(len(content) - 100))
    damaged.replace(path)
    assert find_runs(tmp_path).runs == ()


def test_open_database_is_copied_once_for_all_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    copies = list[Path]()
    copied = database_module._copied
    monkeypatch.setattr(database_module, "_copied", lambda *args: copies.append(args[0]) or copied(*args))
    (tmp_path / "project").mkdir()
    path = make_database(tmp_path / "project" / "open.db")
    with opened(path) as database:
        for run in ("one", "two"):
            log(database, run, 0, {"loss": 0.5})
        database.commit()
        runs = find_runs(path.parent).runs
        for step in (1, 2):
            assert [values_of(run.logs[0].open().poll().points, "loss")[0] for run in runs] == [(0, 0.5)] * 2
            assert len(copies) == step and not list((tmp_path / "temporary").iterdir())
            log(database, "one", step, {"loss": 0.25})
            database.commit()
