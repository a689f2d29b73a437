"""`queue.json`: the place of a run in the queue survives its supervisor, and invalid files count as none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.queue.state import (
    Dependency,
    QueueStage,
    QueueState,
    is_interrupted,
    read_queue_state,
    write_queue_state,
)
from engine.runs.ownership import Ownership
from engine.utils.codec import encode
from support.replace import replace
from support.runs.factories import make_run_folder

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
