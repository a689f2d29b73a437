"""The reservation of this process and the lock of the host, without GPUs: how they survive each other's ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.gpus import reservation
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation import Reservation, allocation_lock
from engine.gpus.reservation_reader import read_reservations
from support.messages import raises_problem


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    return tmp_path


def test_reservation_publishes_what_was_set_before_and_after_it_was_made(base: Path) -> None:
    own = Reservation()
    assert own.backfill_until == 0.0
    own.set_backfill_until(5.0)
    own.set_terms(QueueTerms(priority=2), "held")
    own.set_run_name("early")
    own.enqueue("free:1", ["GPU-1"], "a")
    [found] = read_reservations()
    assert (found.run, found.priority, found.reason, found.backfill_until) == ("a", 2, "held", 5.0)
    own.set_backfill_until(7.0)
    own.set_terms(QueueTerms(priority=3))
    own.set_run_name("late")
    [found] = read_reservations()
    assert (found.run, found.priority, found.reason, found.backfill_until) == ("late", 3, "held", 7.0)
    assert own.backfill_until == 7.0
    own.release()
    assert list(base.iterdir()) == []


def test_reservation_touches_lock_every_hour_although_its_entry_is_written_more_often(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 10_000.0
    clock = SimpleNamespace(monotonic=lambda: now_s, time=time.time, time_ns=time.time_ns)
    monkeypatch.setattr(reservation, "time", clock)
    own = Reservation()
    own.enqueue("free:1", ["GPU-1"], "a")
    own.touch()
    [lock] = base.glob("gputrain-*/*.lock")
    os.utime(lock, (0, 0))
    for minutes, touched in ((30, False), (50, False), (70, True)):
        now_s = 10_000.0 + 60 * minutes
        # This does not change the lock file, and /tmp cleaners delete each file by its own age.
        own.set_run_name(f"a-{minutes}")
        own.touch()
        assert (lock.stat().st_mtime > 0) == touched
    own.release()


def test_reservation_is_made_although_another_run_removes_the_folder(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_folder, attempts = reservation._user_folder, []

    def remove_folder_twice() -> Path:
        folder = user_folder()
        attempts.append(folder)
        if len(attempts) < 3:
            folder.rmdir()
        return folder

    monkeypatch.setattr(reservation, "_user_folder", remove_folder_twice)
    own = Reservation()
    own.enqueue("free:1", ["GPU-1"], "a")
    assert len(read_reservations()) == 1
    own.release()


def test_folder_of_reservations_is_never_writable_for_others(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, chmod = [], Path.chmod

    def record(path: Path, mode: int) -> None:
        modes.append(path.stat().st_mode & 0o777)
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", record)
    previous = os.umask(0)
    try:
        own = Reservation()
        own.enqueue("free:1", ["GPU-1"], "a")
    finally:
        os.umask(previous)
    own.release()
    assert modes == [0o755]


def test_allocation_lock_is_exclusive_and_leaves_no_file(base: Path) -> None:
    with allocation_lock() as problem, allocation_lock(timeout_s=0.0) as other_problem:
        assert problem is None
        assert other_problem is not None
        assert other_problem.startswith(f"another process has locked {base / 'gputrain.lock'} for 0 s")
    assert list(base.iterdir()) == []


def test_allocation_lock_is_taken_although_its_holder_removes_the_file(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_regular_file, paths = reservation.open_regular_file, []

    def remove_file_once(path: Path) -> object:
        paths.append(path)
        if len(paths) == 1:
            path.unlink()
        return open_regular_file(path)

    monkeypatch.setattr(reservation, "open_regular_file", remove_file_once)
    with allocation_lock() as problem:
        assert problem is None
        assert len(paths) == 2


def test_rejoining_the_queue_replaces_the_entry(base: Path) -> None:
    own = Reservation()
    own.enqueue("free:1", ["GPU-1"], "a")
    [before] = read_reservations()
    own.rejoin("free:1", ["GPU-1"], "a")
    [after] = read_reservations()
    assert after.since > before.since
    assert own.key == after.key != before.key
    own.release()
    assert list(base.iterdir()) == []


def test_failed_attempt_to_rejoin_the_queue_keeps_the_old_place(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, write: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    own = Reservation()
    own.enqueue("free:1", ["GPU-1"], "a")
    before, files = read_reservations(), sorted(base.glob("*/*"))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched, raises_problem("not-writable", "device.gpus", base, "No space left"):
        patched.setattr(reservation, "replace_file", fail)
        own.rejoin("free:1", ["GPU-1"], "a")
    assert (read_reservations(), sorted(base.glob("*/*"))) == (before, files)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    own.release()
    assert list(base.iterdir()) == []


@pytest.mark.parametrize(
    ("is_file", "named", "reason"), [(False, "missing", "No such file"), (True, "gputrain", "Not a")]
)
def test_unusable_base_is_refused_with_the_way_out(
    base: Path, monkeypatch: pytest.MonkeyPatch, is_file: bool, named: str, reason: str
) -> None:
    if is_file:
        (base / "missing").touch()
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(base / "missing"))
    with raises_problem("not-writable", "device.gpus", named, reason, "GPUTRAIN_RESERVATIONS"):
        Reservation().enqueue("free:1", ["GPU-1"], "a")


def test_reservation_without_write_locks_is_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    own = Reservation()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "fcntl", refuse)
        own.enqueue("free:1", ["GPU-1"], "a")
    assert [each.run for each in read_reservations()] == ["a"]
    own.release()
