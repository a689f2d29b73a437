"""The list of runs as it is followed: new, growing, deleted and large runs, and what of them is read first."""

from __future__ import annotations

import gzip
import os
import shutil
import time
from itertools import chain
from pathlib import Path

import pytest

from engine.watch import run_list
from engine.watch.activity import Activity
from engine.watch.folders import RunFinder, find_runs
from engine.watch.run_list import ForeignRunList, ListedRun
from support.foreign import event, event_file, scalar, session_start, wandb_file

RECORDED = Path(__file__).parents[2] / "recordings" / "foreign"
EXIT = b"\x92\x01\x00"  # an empty `RunExitRecord`, field 18 of a W&B `Record`


def follow(path: Path, monkeypatch: pytest.MonkeyPatch) -> ForeignRunList:
    """Return a list that searches and looks at all files in each poll."""
    monkeypatch.setattr(run_list, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(run_list, "SEARCH_SHARE", 1e9)
    monkeypatch.setattr(run_list, "CHECK_INTERVAL_SECONDS", 0.0)
    return ForeignRunList(RunFinder(path).search)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ForeignRunList:
    return follow(tmp_path, monkeypatch)


def make_run(folder: Path, *losses: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{step},{loss}" for step, loss in enumerate(losses)]
    (folder / "metrics.csv").write_text("\n".join(["step,loss", *lines, ""]))
    return folder / "metrics.csv"


def names(found: ForeignRunList) -> list[str]:
    return [listed.run.name for listed in found.runs]


def only(found: ForeignRunList) -> ListedRun:
    (listed,) = found.runs
    return listed


def test_list_has_values_of_all_runs_and_the_latest_first(found: ForeignRunList, tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        os.utime(make_run(tmp_path / name, 1.0, 0.25, 0.5), (1e9 + number, 1e9 + number))
    found.poll(5.0)
    assert names(found) == ["new", "old"] and found.complete
    assert [listed.activity for listed in found.runs] == [Activity.QUIET] * 2
    loss = found.runs[0].metrics["loss"]
    assert (loss.step, loss.last, loss.low, loss.high) == (2, 0.5, 0.25, 1.0)


def test_list_finds_new_growing_and_deleted_runs(found: ForeignRunList, tmp_path: Path) -> None:
    make_run(tmp_path / "a", 1.0)
    found.poll(5.0)
    before = found.runs
    found.poll(5.0)
    assert found.runs is before
    with (tmp_path / "a" / "metrics.csv").open("a") as file:
        file.write("1,0.5\n")
    make_run(tmp_path / "b", 1.0)
    found.poll(5.0)
    assert sorted(names(found)) == ["a", "b"]
    assert {listed.run.name: listed.metrics["loss"].step for listed in found.runs} == {"a": 1, "b": 0}
    assert all(listed.activity is Activity.GROWING for listed in found.runs)
    shutil.rmtree(tmp_path / "a")
    found.poll(5.0)
    assert names(found) == ["b"]


def test_list_reads_wanted_runs_first_when_time_is_short(tmp_path: Path) -> None:
    for number in range(20):
        make_run(tmp_path / f"run-{number}", 1.0)
    found = ForeignRunList(lambda: iter([find_runs(tmp_path)]))
    found.poll(0.0)
    last = found.runs[-1].key
    found.poll(0.0, [last])
    assert next(listed for listed in found.runs if listed.key == last).is_read
    assert found.num_read < 20 and not found.complete


def test_list_does_not_read_large_logs_and_says_so(
    found: ForeignRunList, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, *[0.5] * 2000)
    monkeypatch.setattr(run_list, "MAX_ROW_BYTES", 1000)
    found.poll(5.0)
    listed = only(found)
    assert "enter reads" in listed.note and not listed.metrics and found.complete


def test_list_keeps_the_last_value_of_a_resumed_writer(found: ForeignRunList, tmp_path: Path) -> None:
    records = [event(step, scalar("loss", 1.0)) for step in range(5)]
    records += [session_start(2), event(2, scalar("loss", 0.5))]
    (tmp_path / "events.out.tfevents.1.host").write_bytes(event_file(*records))
    found.poll(5.0)
    loss = only(found).metrics["loss"]
    assert (loss.step, loss.last) == (2, 0.5)


def test_run_whose_log_records_its_end_has_ended(found: ForeignRunList, tmp_path: Path) -> None:
    (tmp_path / "run-a.wandb").write_bytes(wandb_file(records=[EXIT]))
    found.poll(5.0)
    found.poll(5.0)
    assert only(found).activity is Activity.ENDED and time.time() - only(found).changed_at < 60


def test_list_follows_a_database_that_grows_beyond_the_limit(
    found: ForeignRunList, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite3 = pytest.importorskip("sqlite3")
    path = tmp_path / "proj.db"
    insert = "INSERT INTO metrics VALUES (NULL, '2026-01-01', 'one', ?, '{\"loss\": 0.5}')"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp, run_name, step, metrics)")
    database.executemany(insert, [(step,) for step in range(500)])
    database.commit()
    monkeypatch.setattr(run_list, "MAX_ROW_BYTES", path.stat().st_size)
    found.poll(5.0)
    database.executemany(insert, [(step,) for step in range(500, 900)])
    database.commit()
    database.close()
    found.poll(5.0)
    assert only(found).metrics["loss"].step == 899 and not only(found).note


def test_runs_of_one_file_and_of_a_folder_of_the_same_name_are_apart(found: ForeignRunList, tmp_path: Path) -> None:
    (tmp_path / "proj.db").write_bytes(gzip.decompress((RECORDED / "trackio" / "proj.db.gz").read_bytes()))
    [name] = (run.name.rpartition("/")[2] for run in find_runs(tmp_path).runs)
    make_run(tmp_path / "proj" / name, 1.0)
    found.poll(5.0)
    assert {listed.run.formats for listed in found.runs} == {("trackio",), ("csv",)}


def test_two_files_of_one_folder_are_two_runs(found: ForeignRunList, tmp_path: Path) -> None:
    files = [make_run(tmp_path, 1.0).rename(tmp_path / name) for name in ("a.csv", "b.csv")]
    found._search = lambda: chain.from_iterable(RunFinder(file).search() for file in files)
    found.poll(5.0)
    assert sorted(names(found)) == ["a", "b"]


def test_runs_of_gputrain_are_found_apart(found: ForeignRunList, tmp_path: Path) -> None:
    make_run(tmp_path / "other", 1.0)
    (tmp_path / "runs" / "own").mkdir(parents=True)
    for name in ("events.jsonl", "owner.json", "metrics.csv"):
        (tmp_path / "runs" / "own" / name).write_text("step,loss\n1,0.5\n")
    found.poll(5.0)
    assert names(found) == ["other"] and found.own == {tmp_path / "runs" / "own"}
    shutil.rmtree(tmp_path / "runs")
    found.poll(5.0)
    assert not found.own
