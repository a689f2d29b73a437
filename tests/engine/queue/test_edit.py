"""What `gputrain queue` refuses: runs that have no place in the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.queue.edit import find_own_row
from engine.runs.events import RunFinished
from engine.runs.ownership import Ownership
from support.messages import raises_problem
from support.runs.event_factories import make_run_started
from support.runs.factories import make_run_folder
from support.screen.queue_rows import make_row


def test_find_own_row_names_command_that_stops_run_which_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    ownership = Ownership(make_run_folder(tmp_path, "a", make_run_started()))
    with raises_problem("wrong-state", "a", "it is running", "`gputrain stop a`"):
        find_own_row("a", tmp_path)
    ownership.release()


def test_find_own_row_takes_no_beginning_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    rows = [make_row("job10", 1, 0.0, folder=str(tmp_path / "job10"), reason="")]
    with raises_problem("unknown-run", "job1"):
        find_own_row("job1", tmp_path, rows)
    assert find_own_row("job10", tmp_path, rows) is rows[0]


@pytest.mark.parametrize(
    ("state", "advice"), [("stopped", "`gputrain resume a --queue`"), ("finished", "`gputrain queue` lists")]
)
def test_find_own_row_names_state_of_ended_run_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, advice: str
) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    make_run_folder(tmp_path, "a", make_run_started(), RunFinished(state=state))
    with raises_problem("wrong-state", "a", f"it is {state}", advice):
        find_own_row("a", tmp_path)
