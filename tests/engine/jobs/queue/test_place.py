"""Begin times, and jobs of one batch that fail at once and hold the rest of it, until the user releases one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.base.units import format_date
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.gpus import allocation
from engine.gpus.queue_terms import MAX_TIME, QueueTerms
from engine.jobs.launch.request import RunRequest
from engine.jobs.queue import place as place_module
from engine.jobs.queue.edit import find_own_row, set_begin
from engine.jobs.queue.listing import RowState, list_queue
from engine.jobs.queue.place import QueuePlace
from engine.jobs.queue.state import QueueStage, read_queue_state, write_queue_state
from engine.runs.command_events import CommandStarted
from engine.runs.control import send_request
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from engine.runs.recorder import Recorder
from support.messages import raises_problem
from support.replace import replace
from support.runs.factories import make_queue_state, make_run_folder, write_run_record
from support.runs.run_owner import Owner

QUEUED_AT = 1000.0
STARTED_AT = 1100.0
JOB: dict[str, Any] = {"program": "train", "cwd": "/home/ana", "submitted_at": QUEUED_AT}
STARTED = CommandStarted(
    time=STARTED_AT, format=1, name="a", host="h", command="python train.py", cwd="/home/ana", pid=1, run_id="a-1",
    devices=["cpu"], ranks=[], parameters={}, versions={},
)  # fmt: skip


def make_job(root: Path, name: str, seconds: float = 2.0, state: str = "failed", **place: Any) -> RunFolder:
    """Make a job of the batch that was started and ended after `seconds`."""
    end = RunFinished(time=STARTED_AT + seconds, state=state, message="ModuleNotFoundError: timm", exit_code=1)
    folder = make_run_folder(root, name, STARTED, end)
    write_run_record(folder)
    stored = make_queue_state(**JOB | {"stage": QueueStage.STARTED, "granted_at": STARTED_AT} | place)
    write_queue_state(folder, stored)
    return folder


class Waiting:
    """A job of the batch that waits in the queue; `messages` are those that it would send."""

    def __init__(self, root: Path, name: str, **place: Any) -> None:
        self.folder = make_run_folder(root, name)
        self._ownership = Ownership(self.folder)
        self.messages: list[str] = []
        recorder = Recorder(self.folder, Config(), lambda _: None)
        state = make_queue_state(**JOB | place)
        write_queue_state(self.folder, state)
        self.place = QueuePlace(
            self.folder, state, QueueTerms(), recorder, lambda: None, on_crash_hold=self.messages.append
        )

    def reason(self) -> str:
        """Return why it is held; "" if it is not."""
        terms, reason = self.place.poll_terms()
        assert terms.blocked == ("held" if reason else "")
        return reason

    def close(self) -> None:
        self.place.recorder.close()
        self._ownership.release()


@contextmanager
def waiting(root: Path, name: str = "z", **place: Any) -> Iterator[Waiting]:
    job = Waiting(root, name, **place)
    yield job
    job.close()


def test_two_jobs_that_fail_at_once_hold_the_rest_of_their_batch(tmp_path: Path) -> None:
    make_job(tmp_path, "a")
    with waiting(tmp_path) as job:
        assert job.reason() == ""
        make_job(tmp_path, "b")
        reason = job.reason()
        for part in ("a, b failed", "ModuleNotFoundError: timm", "`gputrain queue release z`"):
            assert part in reason
        stored = read_queue_state(job.folder)
        assert stored is not None and stored.crash_hold in reason


@pytest.mark.parametrize(
    "other",
    [
        {"program": "evaluate"},
        {"cwd": "/home/ana/other"},
        {"code": "of another commit"},
        {"submitted_at": QUEUED_AT - 601},
        {"seconds": 31.0},
        {"state": "stopped"},
        {"state": "finished"},
        {"granted_at": None, "stage": QueueStage.ENDED},
    ],
)
def test_jobs_of_other_batches_and_jobs_that_work_hold_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    make_job(tmp_path, "a")
    make_job(tmp_path, "b", **other)
    with waiting(tmp_path) as job:
        assert job.reason() == ""


@pytest.mark.parametrize("seconds", [2.0, 31.0])
def test_failures_before_the_start_count(tmp_path: Path, seconds: float) -> None:
    make_job(tmp_path, "a")
    make_job(tmp_path, "b", seconds, stage=QueueStage.ENDED)
    with waiting(tmp_path) as job:
        assert "a, b failed" in job.reason()


@pytest.mark.parametrize(("seconds", "counts"), [(2.0, True), (31.0, False)])
def test_supervisor_that_is_killed_at_once_counts(tmp_path: Path, seconds: float, counts: bool) -> None:
    make_job(tmp_path, "a")
    folder = make_run_folder(tmp_path, "b", STARTED)
    write_run_record(folder)
    write_queue_state(folder, make_queue_state(**JOB, stage=QueueStage.STARTED, granted_at=STARTED_AT))
    folder.owner.touch()
    os.utime(folder.owner, (STARTED_AT, STARTED_AT + seconds))
    with waiting(tmp_path) as job:
        assert ("a, b failed" in job.reason()) == counts


def test_command_that_a_person_ends_by_a_signal_does_not_count(tmp_path: Path) -> None:
    make_job(tmp_path, "a")
    folder = make_run_folder(tmp_path, "b", STARTED, RunFinished(time=STARTED_AT, state="failed", exit_code=-15))
    write_run_record(folder)
    write_queue_state(folder, make_queue_state(**JOB, stage=QueueStage.STARTED, granted_at=STARTED_AT))
    with waiting(tmp_path) as job:
        assert job.reason() == ""


def test_release_of_one_job_starts_the_rest_and_forgets_the_failures(tmp_path: Path) -> None:
    make_job(tmp_path, "a")
    make_job(tmp_path, "b")
    with waiting(tmp_path, "y") as first, waiting(tmp_path, "z") as second:
        assert first.reason() and second.reason()
        send_request(first.folder.control, "release")
        assert first.reason() == second.reason() == ""
        with waiting(tmp_path, "later", submitted_at=QUEUED_AT + 60) as later:
            assert later.reason() == ""


def test_failures_just_after_a_release_hold_the_rest_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        make_job(tmp_path, name)
    with waiting(tmp_path, "y") as first, waiting(tmp_path, "z") as second:
        assert first.reason() and second.reason()
        monkeypatch.setattr(time, "time", lambda: STARTED_AT + 3.0)
        send_request(first.folder.control, "release")
        assert first.reason() == second.reason() == ""
        for name in ("c", "d"):
            make_job(tmp_path, name, seconds=4.0)
        assert "c, d failed" in first.reason() and "c, d failed" in second.reason()


def test_hold_that_is_saved_just_after_a_release_is_dropped(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_job(tmp_path, name)
    now = time.time()
    with (
        waiting(tmp_path, "y", released_at=now),
        waiting(tmp_path, "z", crash_hold="a, b failed", crash_held_at=now - 1) as late,
    ):
        assert late.reason() == ""


def test_jobs_stay_held_when_those_that_failed_are_deleted(tmp_path: Path) -> None:
    failed = [make_job(tmp_path, name) for name in ("a", "b")]
    with waiting(tmp_path) as job:
        reason = job.reason()
        for folder in failed:
            folder.path.rename(tmp_path / f".{folder.name}")
        assert job.reason() == reason


def test_one_job_of_a_batch_sends_a_message(tmp_path: Path) -> None:
    make_job(tmp_path, "a")
    make_job(tmp_path, "b")
    with waiting(tmp_path, "z") as second, waiting(tmp_path, "y") as first:
        for job in (second, first, first, second):
            job.reason()
        assert (len(first.messages), second.messages) == (1, [])


def test_job_that_works_shows_that_earlier_failures_were_their_own(tmp_path: Path) -> None:
    make_job(tmp_path, "a")
    make_job(tmp_path, "b")
    make_job(tmp_path, "c", 31.0, state="finished")
    with waiting(tmp_path) as job:
        assert job.reason() == ""
        make_job(tmp_path, "d")
        make_job(tmp_path, "e")
        assert "d, e failed" in job.reason()


def test_guard_reads_no_run_that_was_queued_long_before(tmp_path: Path) -> None:
    old = make_job(tmp_path, "a")
    with waiting(tmp_path, submitted_at=old.path.stat().st_mtime + 700) as job:
        assert job.reason() == ""
        write_queue_state(old, replace(make_queue_state(), program="train"))
        assert job.reason() == ""


NOW = 1_795_000_000.0


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path / "reservations"))
    (tmp_path / "reservations").mkdir()
    monkeypatch.setattr(allocation, "WAIT_POLL_SECONDS", 0.01)
    return tmp_path / "runs"


def queued(runs: Path, begin: str) -> Owner:
    settings = ["run.name=late", "run.resume=true", "device.gpus=cpu", f"queue.begin={begin}"]
    return Owner(RunRequest(resolve_config("digits", settings).config, runs, "late"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The Unix time that the queue reads, in a list."""
    now = [NOW]
    monkeypatch.setattr(place_module.time, "time", lambda: now[0])
    yield now
    monkeypatch.undo()


def test_run_is_blocked_until_its_begin_time(runs: Path, clock: list[float]) -> None:
    run = queued(runs, "now+2h")
    place = run.queue().place
    terms, reason = place.poll_terms()
    assert (terms.blocked, terms.begin, reason) == ("begin", NOW + 7200, f"begins at {format_date(NOW + 7200)}")
    clock[0] = NOW + 7201
    terms, reason = place.poll_terms()
    assert (terms.blocked, reason) == ("", "")
    run.release()


def test_begin_time_survives_restart_of_owner(runs: Path, clock: list[float]) -> None:
    first = queued(runs, "now+2h")
    first.queue()
    # As after a kill: nothing is recorded.
    first.release()
    clock[0] = NOW + 3600
    second = queued(runs, "now+2h")
    state = second.queue().place.state
    assert state.begin == NOW + 7200
    second.release()


def test_request_changes_begin_time(runs: Path, clock: list[float]) -> None:
    run = queued(runs, "now+2h")
    place = run.queue().place
    for begin, is_valid in ((NOW + 60, True), (2 * MAX_TIME, False), (-1.0, False), (0.0, True)):
        send_request(place.folder.control, "begin", begin=begin)
        before = place.state.begin
        place.poll_terms()
        state = read_queue_state(place.folder)
        assert state is not None and state.begin == (begin if is_valid else before)
    assert place.poll_terms()[0].blocked == ""
    run.release()


def test_interrupted_run_keeps_begin_time_in_list_and_refuses_to_change_it(runs: Path) -> None:
    run = queued(runs, "now+2h")
    begin = run.queue().place.state.begin
    run.release()
    row = find_own_row("late", runs, list_queue(runs))
    assert (row.state, row.begin) == (RowState.INTERRUPTED, begin)
    with raises_problem("wrong-state", "late", "gputrain queue resume late"):
        set_begin(row, 0.0)
    assert RunFolder(runs / "late").path.is_dir()
