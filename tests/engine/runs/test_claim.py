"""Claims of other hosts: clocks that differ, heartbeats that move or not, container names, and a run taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.base.process import boot_id, seconds_since_boot
from engine.runs import claim as claims
from engine.runs.claim import is_claimed, read_claim, watch_claims
from engine.runs.folder import RunFolder, RunState
from engine.runs.manage import move_to_trash
from engine.runs.ownership import Ownership, RunTakenOverError, claim_run
from engine.runs.run_row import open_run
from support.messages import raises_problem
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder, row_of

HOUR = 3600.0
INTERVAL = 5.0


@dataclass
class FakeClock:
    """The clocks that `engine.runs.claim` reads. `sleep` only advances them, `step_s` changes the system time."""

    step_s: float = 0.0
    passed_s: float = 0.0
    on_sleep: Callable[[], object] = field(default=lambda: None)
    strftime = staticmethod(time.strftime)
    localtime = staticmethod(time.localtime)
    _start: tuple[float, float] = field(default_factory=lambda: (time.time(), time.monotonic()))

    def time(self) -> float:
        return self._start[0] + self.passed_s + self.step_s

    def monotonic(self) -> float:
        return self._start[1] + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(claims, "time", clock)
    monkeypatch.setattr(claims, "_sightings", {})
    return clock


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run_folder(tmp_path, "a", make_run_started(), make_epoch(1))


def write_claim(folder: RunFolder, heartbeat: float | None, *, modified: float | None = None, **fields: object) -> None:
    values = {"format": 1, "host": "node7", "pid": 7, "heartbeat": heartbeat, "write_lock": True} | fields
    folder.owner.write_text(json.dumps(values))
    modified = heartbeat if modified is None else modified
    if modified is not None:
        os.utime(folder.owner, (modified, modified))


class OtherHost:
    """A live owner on another host whose clock differs by `skew_s`."""

    def __init__(self, folder: RunFolder, clock: FakeClock, skew_s: float) -> None:
        self._folder, self._clock, self._skew_s = folder, clock, skew_s
        self._renewed_s = clock.passed_s - 3.0
        self.renew()
        clock.on_sleep = self.renew_if_due

    def renew(self) -> None:
        write_claim(self._folder, self._clock.time() + self._skew_s, boot_id="boot-of-node7")

    def renew_if_due(self) -> None:
        if self._clock.passed_s - self._renewed_s >= INTERVAL:
            self._renewed_s += INTERVAL
            self.renew()


@pytest.mark.parametrize("skew_s", [0.0, HOUR, 10 * 365 * 24 * HOUR], ids=["right", "hour", "years"])
def test_dead_owner_on_other_host_blocks_no_longer_than_timeout(
    folder: RunFolder, clock: FakeClock, skew_s: float
) -> None:
    write_claim(folder, clock.time() + skew_s)
    assert folder.is_owned()
    clock.sleep(29.0)
    assert folder.is_owned() and open_run(folder).state is RunState.RUNNING
    clock.sleep(2.0)
    assert not folder.is_owned() and open_run(folder).state is RunState.CRASHED


@pytest.mark.parametrize("skew_s", [-HOUR, 0.0, HOUR], ids=["behind", "right", "ahead"])
def test_live_owner_on_other_host_is_never_taken_over(folder: RunFolder, clock: FakeClock, skew_s: float) -> None:
    OtherHost(folder, clock, skew_s)
    with raises_problem("already-running", "a", "process 7 on node7", "`gputrain stop a`", "--name"):
        claim_run(folder.path.parent, "a", "x", resume=True)
    with raises_problem("already-running", "a", "process 7 on node7", "`gputrain stop a`"):
        move_to_trash(folder)
    # It renews its heartbeat every 5 s, so nobody waited longer.
    assert clock.passed_s <= INTERVAL
    clock.sleep(INTERVAL)
    assert folder.is_owned()


def test_clock_of_reader_that_is_set_does_not_change_state_of_seen_owner(folder: RunFolder, clock: FakeClock) -> None:
    OtherHost(folder, clock, 0.0)
    states = []
    for step_s in (0.0, HOUR, -HOUR, 0.0):
        clock.step_s = step_s
        clock.sleep(INTERVAL)
        states.append(folder.is_owned())
    assert states == [True] * 4


@pytest.mark.parametrize(
    ("age_s", "watched_s"), [(-HOUR, claims.HEARTBEAT_TIMEOUT_SECONDS), (31.0, claims.MOVE_TIMEOUT_SECONDS)]
)
def test_heartbeat_that_does_not_move_is_watched_before_the_resume_and_for_longer_in_the_future(
    folder: RunFolder, clock: FakeClock, age_s: float, watched_s: float
) -> None:
    write_claim(folder, clock.time() - age_s)
    assert folder.is_owned() == (age_s < 0)
    claim_run(folder.path.parent, "a", "x", resume=True).ownership.release()
    assert clock.passed_s == watched_s
    written = read_claim(folder.owner)
    assert written is not None and (written.host, written.pid) == (socket.gethostname(), os.getpid())


def test_several_claims_are_watched_at_the_same_time(tmp_path: Path, clock: FakeClock) -> None:
    folders = [make_run_folder(tmp_path, f"run-{number}") for number in range(5)]
    for each in folders:
        write_claim(each, clock.time() - HOUR)
    watch_claims([each.owner for each in folders])
    for each in folders:
        move_to_trash(each)
    assert clock.passed_s == claims.MOVE_TIMEOUT_SECONDS


def test_time_in_which_the_file_server_did_not_answer_does_not_count(folder: RunFolder, clock: FakeClock) -> None:
    """The owner could not renew its heartbeat either."""
    write_claim(folder, clock.time())

    def hang() -> None:
        clock.passed_s += 60
        clock.on_sleep = lambda: None

    clock.on_sleep = hang
    watch_claims([folder.owner])
    assert clock.passed_s >= 60 + claims.HEARTBEAT_TIMEOUT_SECONDS


def test_file_time_of_server_shows_live_owner_whose_clock_is_behind(folder: RunFolder, clock: FakeClock) -> None:
    write_claim(folder, clock.time() - HOUR, modified=clock.time() - 3)
    assert folder.is_owned()


def test_live_run_whose_lock_was_deleted_is_neither_crashed_nor_resumed(folder: RunFolder, clock: FakeClock) -> None:
    ownership = Ownership(folder.identified())
    for path in (folder.lock, folder.private_lock):
        path.unlink()
    assert folder.is_owned()
    ownership._last_heartbeat = -math.inf
    clock.on_sleep = ownership.renew_heartbeat
    with raises_problem("already-running", "a"):
        claim_run(folder.path.parent, "a", "x", resume=True)
    assert folder.is_owned() and folder.lock.is_file()
    ownership.release()
    claim_run(folder.path.parent, "a", "x", resume=True).ownership.release()


def test_dead_run_whose_lock_was_deleted_is_resumed_after_its_heartbeat_was_watched(
    folder: RunFolder, clock: FakeClock
) -> None:
    folder.lock.unlink()
    write_claim(folder, clock.time(), host=socket.gethostname(), boot_id=boot_id())
    claim_run(folder.path.parent, "a", "x", resume=True).ownership.release()
    assert clock.passed_s == claims.HEARTBEAT_TIMEOUT_SECONDS


@pytest.mark.parametrize(("heartbeat", "write_lock"), [(1.0, True), (None, False)])
def test_flock_on_the_readable_lock_keeps_nobody_from_the_run(
    folder: RunFolder, heartbeat: float | None, write_lock: bool
) -> None:
    """Any user who can read the lock can hold an flock on it."""
    write_claim(folder, heartbeat, host=socket.gethostname(), boot_id=boot_id(), write_lock=write_lock)
    with folder.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not folder.is_owned()
        claim_run(folder.path.parent, "a", "x", resume=True).ownership.release()
        move_to_trash(folder)


def test_owner_without_write_lock_is_judged_by_its_heartbeat(folder: RunFolder, clock: FakeClock) -> None:
    """Some file systems have no write locks, and an earlier gputrain takes none."""
    write_claim(folder, clock.time(), host=socket.gethostname(), boot_id=boot_id(), write_lock=False)
    assert folder.is_owned()
    clock.sleep(31.0)
    assert not folder.is_owned()
    claim_run(folder.path.parent, "a", "x", resume=True).ownership.release()


def test_owner_of_same_boot_is_judged_by_lock_under_any_host_name(folder: RunFolder, clock: FakeClock) -> None:
    """A container that was restarted has another host name, and the same kernel."""
    write_claim(folder, clock.time() - 1, host="3f2a9c1d0e4b", pid=1, boot_id=boot_id())
    assert not folder.is_owned()
    ownership = claim_run(folder.path.parent, "a", "x", resume=True).ownership
    assert clock.passed_s == 0
    write_claim(folder, clock.time() - HOUR, host="3f2a9c1d0e4b", pid=1, boot_id=boot_id())
    assert folder.is_owned()
    ownership._lock.close()
    assert not folder.is_owned()


@pytest.mark.parametrize("fields", [{}, {"boot_id": "the-boot-before"}], ids=["unknown boot", "rebooted"])
def test_owner_of_same_host_name_is_judged_by_lock(folder: RunFolder, clock: FakeClock, fields: dict[str, str]) -> None:
    write_claim(folder, clock.time() - 60, host=socket.gethostname(), **fields)
    assert not folder.is_owned()
    claim_run(folder.path.parent, "a", "x", resume=True).ownership.release()
    assert clock.passed_s == 0


@pytest.mark.parametrize("age_s", [-HOUR, 1.0], ids=["clock set back", "recent"])
def test_recent_owner_of_same_host_name_is_judged_by_lock_and_watched_for_12_s(
    folder: RunFolder, clock: FakeClock, age_s: float
) -> None:
    ownership = Ownership(folder.identified())
    write_claim(folder, clock.time() - age_s, host=socket.gethostname(), boot_id="the-boot-before")
    assert folder.is_owned()
    ownership._lock.close()
    assert not folder.is_owned() and open_run(folder).state is RunState.CRASHED
    claim_run(folder.path.parent, "a", "x", resume=True).ownership.release()
    assert clock.passed_s == claims.MOVE_TIMEOUT_SECONDS


def test_namesake_whose_heartbeat_moves_owns_run(folder: RunFolder, clock: FakeClock) -> None:
    fields = {"host": socket.gethostname(), "boot_id": "another-machine"}
    write_claim(folder, clock.time() - HOUR, **fields)
    assert not folder.is_owned()
    write_claim(folder, clock.time(), **fields)
    clock.on_sleep = lambda: write_claim(folder, clock.time(), **fields)
    with raises_problem("already-running", "a", "process 7"):
        claim_run(folder.path.parent, "a", "x", resume=True)
    assert folder.is_owned()


@pytest.mark.parametrize(
    ("text", "is_here"),
    [
        ('{"format": 1, "host": "\\u001b[2J", "heartbeat": 5}', False),
        ('{"format": 1, "pid": 7, "heartbeat": 4e9}', True),
    ],
)
def test_claim_of_odd_values_is_described_in_printable_text(
    folder: RunFolder, clock: FakeClock, text: str, is_here: bool
) -> None:
    folder.owner.write_text(text)
    claim = read_claim(folder.owner)
    assert claim is not None and claim.is_of_this_kernel is is_here
    assert f"{claim.process} {claim.last_heartbeat()}".isprintable()
    is_claimed(folder.owner)


def test_owner_record_identifies_boot_and_process(folder: RunFolder) -> None:
    ownership = Ownership(folder.identified())
    values, claim = json.loads(folder.owner.read_text()), read_claim(folder.owner)
    assert values["boot_id"] == boot_id() and abs(values["uptime_s"] - seconds_since_boot()) < 60
    assert claim is not None and claim.is_process_here and claim.is_of_this_kernel
    ownership.release()
    reused = {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": boot_id(), "start_ticks": 1}
    write_claim(folder, 1.0, **reused)
    claim = read_claim(folder.owner)
    assert claim is not None and not claim.is_process_here


def test_owner_that_was_taken_over_ends_without_writing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a host that was suspended: its lock is not visible to the one that took the run over."""
    ownership = Ownership(folder.identified())
    write_claim(folder, 1e9, claim="another")
    taken_over = folder.owner.read_bytes()
    ownership.check_late()
    monkeypatch.setattr("engine.runs.ownership.seconds_since_boot", lambda: seconds_since_boot() + 11)
    with raises_problem("taken-over", kind=RunTakenOverError):
        ownership.check_late()
    with raises_problem("taken-over", None, "process 7 on node7", kind=RunTakenOverError):
        ownership.renew_heartbeat()
    ownership.release()
    assert folder.owner.read_bytes() == taken_over


def test_owner_that_ends_before_its_next_heartbeat_leaves_claim_of_other_host(folder: RunFolder) -> None:
    """Two hosts take over a run within one heartbeat, and the first of them ends at once."""
    first = Ownership(folder.identified())
    write_claim(folder, 1e9, claim="second")
    second = folder.owner.read_bytes()
    first.release()
    assert folder.owner.read_bytes() == second


def test_owner_that_cannot_write_its_claim_owns_the_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume on a disk that cannot be written to leaves the claim of the session before."""
    write_claim(folder, None, host=socket.gethostname(), claim="the session before")

    def full(path: Path, values: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for write in ("write_record", "overwrite_record"):
        monkeypatch.setattr(f"engine.runs.ownership.{write}", full)
    ownership = Ownership(folder.identified())
    monkeypatch.setattr("engine.runs.ownership.HEARTBEAT_INTERVAL_SECONDS", 0.0)
    ownership.renew_heartbeat()
    ownership.release()


def test_row_of_dead_claim_names_process_and_command(folder: RunFolder, clock: FakeClock) -> None:
    write_claim(folder, clock.time() + HOUR)
    assert row_of(folder).state == "running"
    clock.sleep(31)
    row = row_of(folder)
    assert row.state == "crashed" and " process 7 on node7 " in row.message
    assert "`gputrain resume`" in row.message
