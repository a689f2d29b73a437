"""The list of the runs in a folder: what it reads, when, in which order, and on slow or damaged file systems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.runs import run_list, run_row
from engine.runs.events import Event, RunContinued, RunFinished, RunPaused, WaitingForGpus
from engine.runs.folder import RunFolder, RunState
from engine.runs.labels import RunLabels
from engine.runs.ownership import Ownership
from engine.runs.run_list import RunList
from engine.runs.run_record import NO_RECORD, RunRecord, read_run_record, write_summary
from engine.runs.run_row import RunRow, make_row, read_row
from support.messages import raises_problem
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step
from support.runs.factories import (
    append_events,
    make_ended_runs,
    make_run_folder,
    row_of,
    write_labels,
)

COUNT = 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_ended_runs(tmp_path / "runs", COUNT)
    # On a busy host, a poll would not reach all runs in its time.
    monkeypatch.setattr(run_list, "CHECK_SECONDS", 10.0)
    return tmp_path / "runs"


def row_named(rows: list[RunRow], name: str) -> RunRow:
    return next(row for row in rows if row.name == name)


def read_list(root: Path) -> RunList:
    """Return the list of all runs. Raises UsageError if the folder cannot be read."""
    runs = RunList(root)
    runs.poll()
    assert runs.complete and runs.count == len(runs.rows)
    return runs


def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of the runs are appended whose files are read."""
    names: list[str] = []

    def read(folder: RunFolder, _: object) -> RunRow | None:
        names.append(folder.name)
        return read_row(folder)

    monkeypatch.setattr(run_list, "read_row", read)
    return names


def age(path: Path) -> None:
    """Set the time of a folder back, so that it is not fresh."""
    os.utime(path, (time.time() - 60, time.time() - 60))


def test_list_keeps_rows_of_runs_from_the_future(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the host was an hour ahead when they trained."""
    ahead = time.time() + 3600
    for folder in root.iterdir():
        record = read_run_record(RunFolder(folder))
        assert record is not None
        write_summary(folder / "summary.json", replace(record, started_at=ahead, updated_at=ahead))
        for path in (*folder.iterdir(), folder):
            os.utime(path, (ahead, ahead))
    os.utime(root, (ahead, ahead))
    runs = read_list(root)
    rows, read = runs.rows, read_names(monkeypatch)
    runs.poll()
    assert runs.rows is rows and read == []
    assert {row.age_seconds for row in rows} == {0.0}


def test_list_rereads_only_changed_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = read_list(root)
    ended, labelled = (RunFolder(root / f"run-{number}") for number in (3, 4))
    append_events(ended, make_epoch(6, accuracy=0.99))
    write_labels(labelled, RunLabels(tags=("night",)))
    read = read_names(monkeypatch)
    runs.poll()
    assert sorted(read) == ["run-3", "run-4"]
    best = row_named(runs.rows, "run-3").record.values.get("best_val_accuracy")
    assert best == 0.99 and row_named(runs.rows, "run-4").tags == ("night",)


def test_list_of_many_runs_finds_changes_of_the_newest_at_once_and_of_the_others_in_turn(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "CHECK_NEWEST", 2)
    monkeypatch.setattr(run_list, "CHECK_OTHERS", 8)
    for folder in root.iterdir():
        age(folder)
    runs = read_list(root)

    def polls_until_tagged(name: str, tag: str, *, check_all: bool = False) -> int:
        write_labels(RunFolder(root / name), RunLabels(tags=(tag,)))
        for polls in range(1, COUNT):
            runs.poll(check_all=check_all)
            if row_named(runs.rows, name).tags == (tag,):
                return polls
        raise AssertionError("The change was never found")

    assert polls_until_tagged(f"run-{COUNT - 1}", "newest") == 1
    assert polls_until_tagged("run-3", "old") <= COUNT // 8 + 1
    assert polls_until_tagged("run-5", "requested", check_all=True) == 1


def test_list_keeps_rows_that_have_not_changed(root: Path) -> None:
    runs = read_list(root)
    before = runs.rows
    runs.poll()
    assert runs.rows is before
    (root / "run-7").rename(root / ".run-7")
    for path in (root / "run-8").iterdir():
        path.unlink()
    (root / "run-8").rmdir()
    make_run_folder(root, "new", make_run_started(), RunFinished(state="stopped"))
    (root / "run-9").rename(root / "renamed")
    runs.poll()
    assert {row.name for row in before} ^ {row.name for row in runs.rows} == {
        "run-7", "run-8", "new", "run-9", "renamed",
    }  # fmt: skip
    kept = row_named(runs.rows, "run-1")
    runs.poll()
    assert row_named(runs.rows, "run-1") is kept


def test_list_finds_folder_that_becomes_a_run_later(root: Path) -> None:
    """The folder of the runs does not change by that."""
    (root / "later").mkdir()
    lock = root / "run-5" / "lock"
    lock.rename(root / "run-5" / "away")
    RunFolder(root / "run-5").summary.unlink()
    for path in (root / "later", root / "run-5", root):
        age(path)
    runs = read_list(root)
    assert runs.count == COUNT - 1
    (root / "run-5" / "away").rename(lock)
    made = make_run_folder(root / "run-6", "made", make_run_started(), RunFinished(state="stopped")).path
    for path in made.iterdir():
        path.rename(root / "later" / path.name)
    runs.poll()
    assert {row.name for row in runs.rows} == {"later"} | {f"run-{number}" for number in range(COUNT)}


def test_list_rereads_folder_that_was_replaced(root: Path) -> None:
    runs = read_list(root)
    (root / "run-1").rename(root.parent / "away")
    (root / "run-2").rename(root / "run-1")
    (root.parent / "away").rename(root / "run-2")
    before = {row.name: row for row in runs.rows}
    runs.poll()
    rows = {row.name: row for row in runs.rows}
    assert rows["run-1"].record == before["run-2"].record != before["run-1"].record == rows["run-2"].record


def test_list_reads_live_run_at_each_poll(root: Path) -> None:
    folder = make_run_folder(root, "live", make_run_started(), make_epoch(1, accuracy=0.1))
    ownership = Ownership(folder)
    runs = read_list(root)
    assert [(row.name, row.state) for row in runs.rows if row.live] == [("live", "running")]
    append_events(folder, make_epoch(2, accuracy=0.2))
    # Its folder may have the same time as before.
    age(folder.path)
    runs.poll()
    assert row_named(runs.rows, "live").record.values.get("val_accuracy") == 0.2
    ownership.release()
    for _ in range(2):
        runs.poll()
        assert row_named(runs.rows, "live").state == row_named(read_list(root).rows, "live").state == "crashed"


def test_list_has_neither_hidden_folders_nor_links_nor_other_folders(root: Path) -> None:
    make_run_folder(root / ".trash", "deleted")
    make_run_folder(root, ".hidden")
    (root / "link").symlink_to(root / "run-1")
    (root / "sweep").mkdir()
    (root / "file").touch()
    odd = make_run_folder(root, "odd")
    odd.summary.unlink()
    odd.lock.unlink()
    odd.lock.symlink_to(root / "run-1" / "lock")
    assert len(read_list(root).rows) == COUNT


def test_list_has_run_whose_lock_is_missing(root: Path) -> None:
    before = row_named(read_list(root).rows, "run-3")
    RunFolder(root / "run-3").lock.unlink()
    assert row_named(read_list(root).rows, "run-3") == before


def test_list_of_missing_folder_is_empty_and_of_unreadable_one_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_list(tmp_path / "missing").rows == []
    (tmp_path / "closed").mkdir()

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("engine.runs.run_list.os.scandir", refuse)
    with raises_problem("not-readable", "runs folder", tmp_path / "closed", "Permission denied"):
        RunList(tmp_path / "closed").poll()


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(os.urandom(4096)),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "sparse": lambda path: os.truncate(path, 1 << 40),
    "link": lambda path: path.rename(path.with_name("x")) and path.symlink_to("x"),
    "folder": lambda path: path.unlink() or path.mkdir(),
    "other format": lambda path: path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 9')),
    "missing": lambda path: path.unlink(),
}


def test_row_of_run_without_valid_record_is_made_from_its_journal(root: Path) -> None:
    expected = read_list(root).rows
    for number, damage in enumerate(DAMAGE.values()):
        damage(root / f"run-{number}" / "summary.json")
    rows = read_list(root).rows
    assert {row.name for row, whole in zip(rows, expected, strict=True) if row != whole} == set()


def test_list_rereads_unreadable_run_although_its_folder_is_unchanged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have other permissions now."""
    monkeypatch.setattr(
        run_list,
        "read_row",
        lambda folder, _: make_row(folder, NO_RECORD, RunState.CRASHED, problem="Permission denied"),
    )
    runs = read_list(root)
    assert {row.message for row in runs.rows} == {"Permission denied"}
    monkeypatch.undo()
    monkeypatch.setattr(run_list, "CHECK_SECONDS", 10.0)
    runs.poll()
    assert not any(row.unreadable for row in runs.rows)


def test_list_reads_what_an_interrupted_poll_did_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: RunFolder, _: object) -> RunRow | None:
        if folder.name == "run-15":
            raise KeyboardInterrupt
        return read_row(folder)

    monkeypatch.setattr(run_list, "read_row", interrupt)
    runs = RunList(root)
    with pytest.raises(KeyboardInterrupt):
        runs.poll()
    monkeypatch.undo()
    runs.poll()
    assert runs.complete and len(runs.rows) == COUNT


def test_list_on_slow_file_system_is_read_by_many_threads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: set[threading.Thread] = set()

    def read_slowly(folder: RunFolder, _: object) -> RunRow | None:
        readers.add(threading.current_thread())
        time.sleep(0.1)
        return read_row(folder)

    monkeypatch.setattr(run_list, "read_row", read_slowly)
    runs = RunList(root)
    runs.poll(0.1)
    # The first poll ends in time, and shows what it has read.
    assert 0 < len(runs.rows) < COUNT and not runs.complete
    while not runs.complete:
        runs.poll(0.1)
    assert len(runs.rows) == COUNT
    assert all(thread.daemon for thread in readers - {threading.main_thread()}) and len(readers) > 10


BLOCKED = """
import sys, threading, time
from pathlib import Path
from engine.runs import run_list
blocked = threading.Event()
def read(*_):
    time.sleep(0.01)
    if len(runs._entries) > 10:
        blocked.set()
        time.sleep(600)
run_list.read_row = read
runs = run_list.RunList(Path(sys.argv[1]))
threading.Thread(target=runs.poll, daemon=True).start()
blocked.wait()
"""


def test_program_ends_while_a_file_server_blocks_the_list(root: Path) -> None:
    subprocess.run([sys.executable, "-c", BLOCKED, str(root)], check=True, timeout=30)


PAUSE = RunPaused(step=5, epoch=1)


@pytest.mark.parametrize(
    ("events", "with_owner", "without"),
    [
        ([], "starting", "crashed"),
        ([WaitingForGpus(message="next")], "waiting", "interrupted"),
        ([make_run_started()], "running", "crashed"),
        ([make_run_started(), PAUSE], "paused", "crashed"),
        ([make_run_started(), PAUSE, RunContinued(step=5, epoch=1)], "running", "crashed"),
        ([make_run_started(), RunFinished(state="stopped")], "starting", "stopped"),
        ([make_run_started(), RunFinished(state="stopped"), make_run_resumed(5, 9.0)], "running", "crashed"),
    ],
)
def test_state_of_row_follows_record_and_owner(
    tmp_path: Path, events: list[Event], with_owner: str, without: str
) -> None:
    folder = make_run_folder(tmp_path, "a", *events)
    # Nobody resumes a run in the milliseconds in which file times are equal.
    os.utime(folder.summary, (1, 1))
    assert row_of(folder).state == without
    owner = Ownership(folder)
    assert row_of(folder).state == with_owner
    owner.release()
    assert row_of(folder).state == without


def test_row_of_run_without_record_does_not_read_a_long_journal(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "sparse", make_run_started())
    folder.summary.unlink()
    os.truncate(folder.journal, 1 << 40)
    row = row_of(folder)
    assert row.message == "summary.json is missing; `gputrain attach sparse` rebuilds it"
    assert (row.record, row.unreadable) == (NO_RECORD, True)


def test_row_of_run_without_record_reports_damaged_journal(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    folder.summary.unlink()
    os.truncate(folder.journal, 1 << 22)
    with folder.journal.open("ab") as file:
        file.write(b"\n")
    assert not row_of(folder).unreadable
    folder.journal.write_text('{"type": "run_started", "time": 1, "format": 2}\n')
    row = row_of(folder)
    assert row.unreadable and "format 2" in row.message


def test_row_of_run_that_ends_while_it_is_read_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_step(5))
    owner = Ownership(folder)
    found = run_row.find_stored_record

    def read_and_end(run: RunFolder) -> tuple[RunRecord, int] | None:
        stored = found(run)
        append_events(folder, RunFinished(state="finished"))
        owner.release()
        return stored

    monkeypatch.setattr(run_row, "find_stored_record", read_and_end)
    row = read_row(folder)
    assert row is not None and (row.state, row.record.state) == ("finished", "finished")


AUDIT = """
import json, sys
from pathlib import Path
from engine.runs.run_list import RunList
root, opened = sys.argv[1], []
sys.addaudithook(lambda event, values: opened.append(values[0]) if event == "open" else None)
runs = RunList(Path(root))
runs.poll()
paths = [path for path in map(str, opened) if path.startswith(root)]
print(json.dumps({row.name: [path[len(row.folder) + 1:] for path in paths if path.startswith(row.folder + "/")]
                  for row in runs.rows}))
"""


def test_list_opens_record_and_labels_of_ended_run_and_no_journal(tmp_path: Path) -> None:
    for state in ("finished", "stopped", "failed"):
        for number in (1, 2):
            folder = make_run_folder(
                tmp_path, f"{state}-{number}", make_run_started(), make_epoch(1), RunFinished(state=state)
            )
            folder.config.touch()
            folder.owner.touch()
        write_labels(folder, RunLabels(tags=("night",)))
    make_run_folder(tmp_path, "crashed", make_run_started(), make_epoch(1))
    result = subprocess.run([sys.executable, "-c", AUDIT, str(tmp_path)], check=True, capture_output=True, text=True)
    opened = json.loads(result.stdout)
    crashed = opened.pop("crashed")
    assert "summary.json" in crashed and "events.jsonl" not in crashed and "config.yaml" not in crashed
    assert len(opened) == 6 and all(names == ["summary.json", "labels.json"] for names in opened.values())


@pytest.mark.soak
def test_list_of_10000_runs_is_complete_within_seconds(tmp_path: Path) -> None:
    make_ended_runs(tmp_path / "runs", 10_000)
    for label in ("cold", "warm"):
        runs, start, cpu = RunList(tmp_path / "runs"), time.monotonic(), time.process_time()
        runs.poll(0.1)
        while len(runs.rows) < 100:
            runs.poll(0.1)
        first, first_cpu = time.monotonic() - start, time.process_time() - cpu
        while not runs.complete:
            runs.poll(0.1)
        whole, whole_cpu = time.monotonic() - start, time.process_time() - cpu
        start = time.monotonic()
        runs.poll(0.1)
        again = time.monotonic() - start
        print(f"\n{label}: 100 rows {first:.2f} s ({first_cpu:.2f} s CPU), all {whole:.2f} s ({whole_cpu:.2f} s CPU)")
        assert len(runs.rows) == 10_000
        # Three times the targets, as other programs may run.
        assert first < 1.8 and again < 0.3
    assert whole < 3.3
