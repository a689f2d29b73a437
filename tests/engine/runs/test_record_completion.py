"""A run that its owner left behind gets its record from the journal, and only the owner's user stores it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from engine.base.codec import replace
from engine.runs import record_completion
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder, RunState
from engine.runs.journal import to_line
from engine.runs.ownership import Ownership
from engine.runs.record_completion import read_journal_record
from engine.runs.run_record import RunRecord, read_run_record, write_summary
from engine.runs.run_row import open_run
from support.runs.event_factories import make_command_started, make_epoch, make_run_resumed, make_run_started
from support.runs.factories import append_events, append_to_journal, make_run_folder

EPOCH = to_line(make_epoch(1, 0.5)) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was killed after it had written an epoch to its journal and before it wrote its record."""
    run = make_run_folder(tmp_path, "a", make_run_started())
    append_to_journal(run, EPOCH)
    return run


def test_record_of_crashed_run_is_completed_and_stored(folder: RunFolder) -> None:
    before = read_run_record(folder)
    assert before is not None and before.values.get("epochs") == 0
    row = open_run(folder)
    values = row.record.values
    assert (values.get("epochs"), values.get("val_accuracy"), row.state) == (1, 0.5, RunState.CRASHED)
    assert read_run_record(folder) == row.record == read_journal_record(folder).record


def test_session_that_only_the_journal_has_is_found(folder: RunFolder) -> None:
    append_events(folder, RunFinished(state="stopped"))
    Ownership(folder).release()
    append_to_journal(folder, to_line(make_run_resumed(10, 5.0)) + "\n")
    os.utime(folder.summary, (1, 1))
    assert open_run(folder).state == "crashed"
    assert read_run_record(folder) == read_journal_record(folder).record


def test_record_of_live_run_is_left_to_its_owner(folder: RunFolder) -> None:
    stored = folder.summary.read_bytes()
    owner = Ownership(folder)
    row = open_run(folder)
    assert (row.record.values.get("epochs"), row.state) == (0, "running")
    assert folder.summary.read_bytes() == stored
    owner.release()


def test_record_that_ended_while_it_was_read_is_no_crash(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Ownership(folder)
    found = record_completion.find_stored_record

    def end_and_read(run: RunFolder) -> tuple[RunRecord, int] | None:
        append_events(folder, RunFinished(state="finished"))
        owner.release()
        return found(run)

    monkeypatch.setattr(record_completion, "find_stored_record", end_and_read)
    assert open_run(folder).state == "finished"


def test_completed_record_is_not_stored_by_others_or_under_a_claim(folder: RunFolder) -> None:
    stored = folder.summary.read_bytes()
    claim = {"format": 1, "host": "elsewhere", "pid": 1, "heartbeat": time.time() - 3600}
    folder.owner.write_text(json.dumps(claim))
    os.utime(folder.owner, (1, 1))
    assert open_run(folder).record.values.get("epochs") == 1
    folder.owner.unlink()
    folder.path.chmod(0o777)
    assert open_run(folder).record.values.get("epochs") == 1
    assert folder.summary.read_bytes() == stored
    folder.path.chmod(0o755)
    open_run(folder)
    assert folder.summary.read_bytes() != stored


@pytest.mark.parametrize("text", ['{"format": 2, "state": "x"}', "{"])
def test_record_that_cannot_be_read_is_replaced(folder: RunFolder, text: str) -> None:
    folder.summary.write_text(text)
    assert open_run(folder).record.values.get("epochs") == 1
    assert folder.summary.read_text() != text


def test_folder_that_is_no_run_gets_no_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.journal.write_text(EPOCH)
    assert open_run(folder).record.values.get("epochs") == 1
    assert [path.name for path in folder.path.iterdir()] == ["events.jsonl"]


def test_record_of_run_that_was_killed_before_its_first_event_is_kept(folder: RunFolder) -> None:
    folder.summary.write_text(json.dumps({"format": 1, "state": "starting", "started_at": 5.0}))
    folder.journal.write_text("")
    row = open_run(folder)
    assert (row.record.started_at, row.state) == (5.0, "crashed")


@pytest.mark.parametrize("is_finished", [False, True])
def test_record_is_completed_once_although_the_clock_was_set_back(folder: RunFolder, is_finished: bool) -> None:
    if is_finished:
        append_events(folder, RunFinished(state="finished"))
    later = time.time() + 3600
    for path in (folder.journal, folder.lock):
        os.utime(path, (later, later))
    record = open_run(folder).record
    written = folder.summary.stat()
    assert open_run(folder).record == record
    assert (folder.summary.stat().st_ino, folder.summary.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_record_of_crashed_command_keeps_its_metrics(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path, "a", make_command_started(1.0))
    stored = read_run_record(run)
    assert stored is not None
    write_summary(run.summary, replace(stored, values=stored.values | {"step": 7, "metrics.loss": 0.5}))
    append_to_journal(run, to_line(RunFinished(time=2.0, state="failed", exit_code=3)) + "\n")
    row = open_run(run)
    assert (row.record.exit_code, row.state) == (3, RunState.FAILED)
    assert (row.record.values["step"], row.record.values["metrics.loss"]) == (7, 0.5)
