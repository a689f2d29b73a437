"""What `gputrain queue` refuses, and the place of a run that is kept over a reboot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.base.codec import encode
from engine.jobs.queue.edit import find_own_row
from engine.jobs.queue.state import (
    Dependency,
    QueueStage,
    QueueState,
    is_interrupted,
    read_queue_state,
    write_queue_state,
)
from engine.runs.events import RunFinished
from engine.runs.ownership import Ownership
from support.messages import raises_problem
from support.replace import replace
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


def test_find_own_row_names_state_of_ended_run_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    make_run_folder(tmp_path, "a", make_run_started(), RunFinished(state="stopped"))
    with raises_problem("wrong-state", "a", "it is stopped", "`gputrain resume a --queue`"):
        find_own_row("a", tmp_path)


STATE = QueueState(
    submitted_at=10.0,
    position=11.5,
    priority=-3,
    held=True,
    after=(Dependency(name="a", any_end=True, device=1, inode=2),),
    stage=QueueStage.WAITING,
    pid=77,
)
UNSAFE_NAMES = ("../a", "/a", "..", ".", "", "a\0")


def test_queue_state_is_read_as_written(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "b")
    assert read_queue_state(folder) is None
    write_queue_state(folder, STATE)
    assert read_queue_state(folder) == STATE


@pytest.mark.parametrize(
    "change",
    [
        {"priority": "5"}, {"priority": True}, {"priority": 1 << 30}, {"position": None}, {"position": "nan"},
        {"stage": "asleep"}, {"after": [1]}, {"after": 3}, {"after": [{"name": "a"}]}, {"pid": None},
        {"pid": float("inf")},
        *({"after": [{"name": name, "any_end": False, "device": 1, "inode": 2}]} for name in UNSAFE_NAMES),
        {"position": 10**400}, {"position": -(10**400)}, {"format": 2}, {"format": None},
    ],
)  # fmt: skip
def test_invalid_queue_state_counts_as_none(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = make_run_folder(tmp_path, "b")
    folder.queue.write_text(json.dumps(json.loads(encode(STATE)) | change))
    assert read_queue_state(folder) is None


def test_run_is_interrupted_if_it_has_not_started_and_has_no_owner(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "b")
    assert not is_interrupted(folder)
    for stage in QueueStage:
        write_queue_state(folder, replace(STATE, stage=stage))
        assert is_interrupted(folder) == (stage in (QueueStage.WAITING, QueueStage.GRANTED))
    write_queue_state(folder, STATE)
    ownership = Ownership(folder)
    assert not is_interrupted(folder)
    ownership.release()
    assert is_interrupted(folder)
