"""The row of a run: its record, and the state that only a reader can tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.runs import run_row
from engine.runs.events import Event, RunContinued, RunFinished, RunPaused, WaitingForGpus
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from engine.runs.run_record import NO_RECORD, RunRecord
from engine.runs.run_row import read_row
from support.runs.event_factories import make_run_resumed, make_run_started, make_step
from support.runs.factories import append_events, make_run_folder, row_of

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
