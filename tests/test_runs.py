"""Run folders: found by name, owned by one, their state told truly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_journal import epoch, started

from engine.runs.control import consume_requests, send_request
from engine.runs.events import ControlEvent, Event, RunFinished
from engine.runs.folder import RunFolder, RunState, find_run, sanitize_run_name
from engine.runs.journal import to_line
from engine.runs.ownership import Ownership, _try_lock, claim_run
from engine.utils.errors import UsageError


def make_run(root: Path, name: str, *events: Event) -> RunFolder:
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    folder.lock.touch()
    folder.journal.write_text("".join(to_line(event) + "\n" for event in events))
    return folder


def state_of(folder: RunFolder) -> RunState:
    return folder.state(folder.history())


def test_a_run_without_an_owner_is_what_its_journal_says_or_crashed(tmp_path: Path) -> None:
    assert state_of(make_run(tmp_path, "a", started(), epoch(1))) == RunState.CRASHED
    assert state_of(make_run(tmp_path, "b", started(), RunFinished(state="stopped"))) == RunState.STOPPED
    assert state_of(make_run(tmp_path, "c", started(), RunFinished(state="failed"))) == RunState.FAILED
    assert state_of(make_run(tmp_path, "d")) == RunState.CRASHED


def test_a_run_with_an_owner_is_live(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a")
    ownership = Ownership(folder)
    assert state_of(folder) == RunState.STARTING
    for event, state in (
        (started(), RunState.RUNNING),
        (ControlEvent(request="stop", by="me", outcome="soon"), RunState.STOPPING),
    ):
        with folder.journal.open("a") as file:
            file.write(to_line(event) + "\n")
        assert state_of(folder) == state
    ownership.release()
    assert state_of(folder) == RunState.CRASHED


def test_a_run_on_another_host_lives_as_long_as_its_heart_beats(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", started())
    beat = {"format": 1, "host": "elsewhere", "pid": 1, "heartbeat": time.time() - 10}
    folder.owner.write_text(json.dumps(beat))
    assert state_of(folder) == RunState.RUNNING
    folder.owner.write_text(json.dumps(beat | {"heartbeat": time.time() - 31}))
    assert state_of(folder) == RunState.CRASHED


def test_a_run_on_another_host_that_its_owner_left_is_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", started(), RunFinished(state="finished"))
    Ownership(folder).release()
    left = json.loads(folder.owner.read_text())
    assert left["heartbeat"] is None
    folder.owner.write_text(json.dumps(left | {"host": "elsewhere"}))
    assert state_of(folder) == RunState.FINISHED


def test_going_on_takes_away_requests_that_came_too_late_and_half_a_checkpoint(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", started())
    send_request(folder.control, "stop")
    folder.checkpoints.mkdir()
    (folder.checkpoints / ".last.pt.123.tmp").write_text("half")
    claim_run(tmp_path, "a", "x", resume=True).ownership.release()
    assert list(folder.control.iterdir()) == []
    assert list(folder.checkpoints.iterdir()) == []


def test_a_folder_that_is_no_run_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(UsageError, match="photos exists"):
        claim_run(tmp_path, "photos", "x", resume=True)


@pytest.mark.parametrize(
    ("stem", "name"), [("my exp", "my-exp"), ("_a.b_", "a.b"), ("ü", "run"), ("x" * 300, "x" * 80)]
)
def test_a_files_name_is_made_fit_for_a_runs(stem: str, name: str) -> None:
    assert sanitize_run_name(stem) == name


def test_two_processes_never_own_one_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a")
    program = f"""
from pathlib import Path
from engine.runs.ownership import Ownership
from engine.runs.folder import RunFolder
owner = Ownership(RunFolder(Path({str(folder.path)!r})))
print("owned", flush=True)
input()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "owned\n"
    with pytest.raises(UsageError, match=f"is being run by process {other.pid}"):
        Ownership(folder)
    other.kill()
    other.communicate()
    Ownership(folder).release()


def test_a_run_that_another_host_is_at_work_on_is_not_taken(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a", started())
    beat = {"format": 1, "host": "node7", "pid": 12, "heartbeat": time.time()}
    folder.owner.write_text(json.dumps(beat))
    with pytest.raises(UsageError, match="is being run by process 12 on node7"):
        claim_run(tmp_path, "a", "x", resume=True)
    folder.owner.write_text(json.dumps(beat | {"heartbeat": time.time() - 31}))
    claim_run(tmp_path, "a", "x", resume=True).ownership.release()


def test_a_lock_whose_file_was_taken_away_owns_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = _try_lock(path)
    assert first is not None
    waiting = os.open(path, os.O_RDWR)
    path.unlink()
    os.close(first)
    second = _try_lock(path)
    assert second is not None
    assert _try_lock(path) is None
    assert os.fstat(second).st_ino == path.stat().st_ino != os.fstat(waiting).st_ino
    os.close(second)
    os.close(waiting)


def test_a_name_is_made_of_the_stem_and_the_next_free_number(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        claimed = claim_run(tmp_path / "runs", None, "digits", resume=False)
        names.append(claimed.folder.name)
        claimed.ownership.release()
    assert names == ["digits-1", "digits-2"]


def test_discarding_a_claim_leaves_what_was_there_before(tmp_path: Path) -> None:
    claimed = claim_run(tmp_path / "deep" / "runs", "a", "x", resume=False)
    claimed.discard()
    claimed.ownership.release()
    assert list(tmp_path.iterdir()) == []
    make_run(tmp_path / "runs", "old", started())
    again = claim_run(tmp_path / "runs", "old", "x", resume=True)
    again.discard()
    again.ownership.release()
    assert (tmp_path / "runs" / "old" / "events.jsonl").exists()


def test_a_run_is_found_by_name_beginning_folder_and_last(tmp_path: Path) -> None:
    for age, name in enumerate(("mnist-1", "digits-1", "digits-12")):
        folder = make_run(tmp_path, name)
        folder.config.touch()
        os.utime(folder.config, (1000 + age, 1000 + age))
    assert find_run(tmp_path, "mn").name == "mnist-1"
    assert find_run(tmp_path, "digits-1").name == "digits-1"
    assert find_run(tmp_path, "last").name == "digits-12"
    assert find_run(tmp_path / "elsewhere", str(tmp_path / "mnist-1")).path == tmp_path / "mnist-1"


def test_a_beginning_of_several_runs_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    for name in ("digits-1", "digits-2"):
        make_run(tmp_path, name)
    with pytest.raises(UsageError, match="could be any of digits-1, digits-2"):
        find_run(tmp_path, "digits")
    with pytest.raises(UsageError, match="did you mean digits-1"):
        find_run(tmp_path, "digts-1")


def test_requests_are_taken_once_oldest_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a")
    send_request(folder.control, "stop")
    send_request(folder.control, "dance")
    assert [request.request for request in consume_requests(folder.control)] == ["stop", "dance"]
    assert list(consume_requests(folder.control)) == []
    assert list(folder.control.iterdir()) == []
