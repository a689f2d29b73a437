"""The index of a runs folder: what it reads, when, and a stored index that is damaged, shared or someone else's."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder, list_runs
from engine.runs.index import RunIndex
from engine.runs.index_file import IndexFile
from engine.runs.journal import to_line
from engine.runs.labels import RunLabels
from engine.runs.ownership import Ownership
from engine.runs.query import SortOrder
from engine.runs.run_row import RunRow, make_run_row
from engine.runs.watcher import RunWatcher
from support.messages import raises_problem
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import append_to_journal, make_ended_runs, make_run_folder, step_lines, write_labels

COUNT = 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setattr("engine.runs.index_file.cache_folder", lambda: folder)
    yield folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_ended_runs(tmp_path / "runs", COUNT)
    return tmp_path / "runs"


def row_of(rows: list[RunRow], name: str) -> RunRow:
    return next(row for row in rows if row.name == name)


def read_rows(root: Path) -> list[RunRow]:
    """Return the rows of all runs, latest start first. Raises UsageError if the folder cannot be read."""
    index = RunIndex(root)
    index.poll()
    index.close()
    return index.rows


def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of the runs are appended whose files are read."""
    names: list[str] = []

    def read(watcher: RunWatcher, *config: object) -> RunRow:
        names.append(watcher.folder.name)
        return make_run_row(watcher, *config)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.runs.index.make_run_row", read)
    return names


def test_index_gives_rows_of_list_runs_cold_and_warm(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [make_run_row(RunWatcher(folder)) for folder in list_runs(root)]
    assert read_rows(root) == expected
    read = read_names(monkeypatch)
    assert read_rows(root) == expected and read == []


def test_index_keeps_rows_of_runs_from_the_future(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the host was an hour ahead when they trained."""
    ahead = time.time() + 3600
    for folder in root.iterdir():
        for path in (*folder.iterdir(), folder):
            os.utime(path, (ahead, ahead))
    rows, read = read_rows(root), read_names(monkeypatch)
    assert read_rows(root) == rows and read == []
    assert {row.age_seconds for row in rows} == {0.0}


def test_index_reads_newest_runs_first_within_time(root: Path) -> None:
    index = RunIndex(root)
    names = []
    while not index.complete:
        index.poll(0)
        names.append([row.name for row in index.rows])
    newest = [f"run-{number}" for number in reversed(range(COUNT))]
    assert names == [newest[: count + 1] for count in range(COUNT)] and index.count == COUNT


def test_index_rereads_only_changed_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_rows(root)
    journal, labels, config = (RunFolder(root / f"run-{number}") for number in (3, 4, 5))
    append_to_journal(journal, to_line(make_epoch(6, accuracy=0.99)) + "\n")
    write_labels(labels, RunLabels(tags=("night",)))
    config.config.write_text("optim:\n  lr: 0.7\n")
    read = read_names(monkeypatch)
    rows = {row.name: row for row in read_rows(root)}
    assert sorted(read) == ["run-3", "run-4", "run-5"]
    assert rows["run-3"].best_val_accuracy == 0.99 and rows["run-4"].tags == ("night",)
    assert rows["run-5"].config == {"optim.lr": 0.7} and read_rows(root)[0].name == "run-5"


def test_index_keeps_row_of_run_with_a_path_that_is_not_utf8(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "run-3").rename(root / os.fsdecode(b"run-\xff"))
    rows, read = read_rows(root), read_names(monkeypatch)
    assert read_rows(root) == rows
    assert read == []


def test_index_keeps_rows_that_have_not_changed(root: Path) -> None:
    index = RunIndex(root)
    index.poll()
    before = index.rows
    index.poll()
    assert index.rows is before
    (root / "run-7" / "lock").unlink()
    for path in (root / "run-8").iterdir():
        path.unlink()
    (root / "run-8").rmdir()
    make_run_folder(root, "new", make_run_started(), RunFinished(state="stopped"))
    index.poll()
    index.poll()
    assert {row.name for row in before} ^ {row.name for row in index.rows} == {"run-7", "run-8", "new"}


def test_index_shows_stored_rows_before_it_compares_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_rows(root)
    edited, labelled = (RunFolder(root / f"run-{number}") for number in (3, 4))
    write_labels(labelled, RunLabels(tags=("night",)))
    edited.config.write_text("optim:\n  lr: 0.7\n")
    read = read_names(monkeypatch)
    index = RunIndex(root, check_later=True)
    index.poll(0)
    # Only a folder that has changed is read at once.
    assert index.complete and read == ["run-4"] and row_of(index.rows, "run-4").tags == ("night",)
    assert [row for row in index.rows if row.name != "run-4"] == [row for row in before if row.name != "run-4"]
    index.poll(0)
    assert row_of(index.rows, "run-3").config == {"optim.lr": 0.7}


def test_index_reads_live_run_at_each_poll(root: Path) -> None:
    folder = make_run_folder(root, "live", make_run_started(), make_epoch(1, accuracy=0.1))
    read_rows(root)
    ownership = Ownership(folder)
    index = RunIndex(root)
    index.poll()
    assert [(row.name, row.state) for row, _ in index.live_runs()] == [("live", "running")]
    append_to_journal(folder, to_line(make_epoch(2, accuracy=0.2)) + "\n")
    index.poll()
    index.close()
    assert row_of(index.rows, "live").val_accuracy == 0.2
    ownership.release()
    assert [row_of(read_rows(root), "live").state for _ in range(2)] == ["crashed", "crashed"]


def test_index_finds_resumed_run(root: Path) -> None:
    index = RunIndex(root)
    index.poll()
    ownership = Ownership(RunFolder(root / "run-0"))
    index.poll()
    assert row_of(index.rows, "run-0").state == "starting"
    ownership.release()
    index.poll()
    assert row_of(index.rows, "run-0").state == "failed"


def test_index_lists_neither_hidden_folders_nor_links_nor_other_folders(root: Path) -> None:
    make_run_folder(root / ".trash", "deleted")
    make_run_folder(root, ".hidden")
    (root / "link").symlink_to(root / "run-1")
    (root / "sweep").mkdir()
    (root / "file").touch()
    assert len(read_rows(root)) == len(list_runs(root)) == COUNT


def test_index_of_missing_folder_is_empty_and_of_unreadable_one_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_rows(tmp_path / "missing") == []
    (tmp_path / "closed").mkdir()

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("engine.runs.index.os.scandir", refuse)
    with raises_problem("not-readable", "runs folder", tmp_path / "closed", "Permission denied"):
        RunIndex(tmp_path / "closed").poll()


def test_index_shows_owner_and_age_of_today(root: Path) -> None:
    read_rows(root)
    (root / "run-2").chmod(0o777)
    row = row_of(read_rows(root), "run-2")
    assert row.foreign == "is writable by all users"
    assert abs(row.age_seconds - (time.time() - (root / "run-2" / "config.yaml").stat().st_mtime)) < 5


def test_index_orders_rows_by_the_start_that_ages_count_from(root: Path) -> None:
    """The oldest run trained until just now."""
    append_to_journal(RunFolder(root / "run-0"), to_line(make_epoch(4)) + "\n")
    rows = read_rows(root)
    ages = [row.age_seconds for row in rows]
    assert rows[-1].name == "run-0" and ages == sorted(ages)
    assert SortOrder.parse("started").sort(rows) == SortOrder.parse("age").sort(rows) == rows


def test_long_journal_of_ended_run_is_read_at_its_end(root: Path) -> None:
    folder = make_run_folder(root, "long", make_run_started(), make_epoch(1, accuracy=0.95))
    append_to_journal(folder, step_lines(2000))
    append_to_journal(
        folder, to_line(make_epoch(2, accuracy=0.5)) + "\n" + to_line(RunFinished(state="stopped")) + "\n"
    )
    folder.summary.write_text(json.dumps({"format": 1, "best_val_accuracy": 0.95, "best_epoch": 1, "seconds": 7.0}))
    row = row_of(read_rows(root), "long")
    whole = make_run_row(RunWatcher(folder))
    assert (row.state, row.epoch, row.epochs, row.best_val_accuracy) == ("stopped", 2, 3, 0.95)
    assert (row.best_epoch, row.step, row.steps, row.seconds) == (1, whole.step, whole.steps, 7.0)


def damage_every_third_line(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(line[:-9] + b"x" if number % 3 == 2 else line for number, line in enumerate(lines)))


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(os.urandom(4096)),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "lines": damage_every_third_line,
    "sparse": lambda path: os.truncate(path, 1 << 40),
    "link": lambda path: path.rename(path.with_name("x")) and path.symlink_to("x"),
    "folder": lambda path: path.unlink() or path.mkdir(),
    "other fields": lambda path: path.write_bytes(path.read_bytes().replace(b'"fields": ["name"', b'"fields": ["nam"')),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_index_is_ignored_and_replaced(root: Path, damage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read_rows(root)
    path = IndexFile(root).path
    damage(path)  # type: ignore[operator]
    assert read_rows(root) == expected
    if path.is_dir():
        path.rmdir()
        read_rows(root)
    read = read_names(monkeypatch)
    assert read_rows(root) == expected and read == []
    assert path.stat().st_mode & 0o777 == 0o600 and not path.is_symlink()


def test_index_that_others_can_change_is_not_used(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_rows(root)
    (cache / "runs").chmod(0o777)
    read = read_names(monkeypatch)
    assert len(read_rows(root)) == len(read) == COUNT


def test_two_programs_write_one_index(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_rows(root)
    first, second = RunIndex(root), RunIndex(root)
    for index in (first, second):
        index.poll()
    for number, index in ((1, first), (2, second)):
        write_labels(RunFolder(root / f"run-{number}"), RunLabels(tags=("night",)))
        for path in (root / f"run-{number}", root / f"run-{number}" / "labels.json"):
            os.utime(path, (time.time() - 60, time.time() - 60))
        index.poll()
        index.close()
    read = read_names(monkeypatch)
    rows = {row.name: row.tags for row in read_rows(root)}
    assert rows["run-1"] == rows["run-2"] == ("night",) and read == []


def test_index_file_is_compacted_after_many_changes(root: Path) -> None:
    for number in range(20):
        for run in range(COUNT):
            os.utime(root / f"run-{run}", (number, number))
        read_rows(root)
    assert IndexFile(root).path.read_bytes().count(b"\n") <= 2 * COUNT + 201


@pytest.mark.soak
def test_index_of_10000_runs_is_complete_within_a_second_when_warm(tmp_path: Path) -> None:
    make_ended_runs(tmp_path / "runs", 10_000)
    for label in ("cold", "warm"):
        index, start, cpu = RunIndex(tmp_path / "runs"), time.monotonic(), time.process_time()
        index.poll(0.1)
        while len(index.rows) < 100:
            index.poll(0.1)
        first, first_cpu = time.monotonic() - start, time.process_time() - cpu
        while not index.complete:
            index.poll(0.1)
        whole, whole_cpu = time.monotonic() - start, time.process_time() - cpu
        index.close()
        print(f"\n{label}: 100 rows {first:.2f} s ({first_cpu:.2f} s CPU), all {whole:.2f} s ({whole_cpu:.2f} s CPU)")
        assert len(index.rows) == 10_000
        # Three times the target, as other programs may run.
        assert first < 3
    assert whole < 3
