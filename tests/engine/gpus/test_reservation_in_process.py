"""The reservation of this process and the lock of the host, without GPUs: how they survive each other's ends."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.base import files
from engine.gpus import reservation
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation import BEAT_SECONDS, Reservation, ReservationError, user_lock
from engine.gpus.reservation_reader import read_reservations
from support.messages import raises_problem


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    return tmp_path


def test_reservation_publishes_what_was_set_before_and_after_it_was_made(base: Path) -> None:
    own = Reservation()
    own.set_terms(QueueTerms(priority=2), "held")
    own.set_run_name("early")
    own.enqueue("free:1", ["GPU-1"], "a")
    [found] = read_reservations()
    assert (found.run, found.priority, found.reason) == ("a", 2, "held")
    own.set_terms(QueueTerms(priority=3))
    own.set_run_name("late")
    [found] = read_reservations()
    assert (found.run, found.priority, found.reason) == ("late", 3, "held")
    own.release()
    assert list(base.iterdir()) == []


def test_reservation_that_is_renewed_keeps_its_arrival_in_the_queue(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(s=10_000.0)
    clock = SimpleNamespace(monotonic=lambda: now.s, time=time.time, time_ns=time.time_ns)
    monkeypatch.setattr(reservation, "time", clock)
    own = Reservation()
    own.enqueue("free:1", ["GPU-1"], "a")
    own.renew()
    [lock], [entry] = base.glob("gputrain-*/*.lock"), base.glob("gputrain-*/*.json")
    [before] = read_reservations()
    for path in (lock, entry):
        os.utime(path, (0, 0))
    changed_at = lock.stat().st_ctime
    for passed_s, is_renewed in ((BEAT_SECONDS / 2, False), (BEAT_SECONDS, True)):
        now.s += passed_s
        own.renew()
        # Cleaners of /tmp look at the last access, too.
        assert [lock.stat().st_atime > 0, entry.stat().st_mtime > 0] == [is_renewed] * 2
    assert lock.stat().st_ctime == changed_at
    [after] = read_reservations()
    assert after.renewed_at is not None and before.renewed_at is not None and after.renewed_at > before.renewed_at
    own.release()


@pytest.mark.parametrize("deleted", ["*", "gputrain-*/*.json", "gputrain-*/*.lock"])
@pytest.mark.parametrize("gpus", [(), ("GPU-1",)])
def test_reservation_that_was_deleted_is_written_again(base: Path, deleted: str, gpus: tuple[str, ...]) -> None:
    own = Reservation()
    own.reserve(gpus, "free:1", ["GPU-1"], "a")
    for path in base.glob(deleted):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert read_reservations() == []
    own.renew()
    [found] = read_reservations()
    assert (found.run, found.gpus, found.key) == ("a", gpus, own.key)
    own.release()
    assert list(base.iterdir()) == []


def test_failed_reservation_holds_no_gpu_later(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, write: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    own = Reservation()
    own.enqueue("free:1", ["GPU-1"], "a")
    with monkeypatch.context() as patched, raises_problem("not-writable", "device.gpus", kind=ReservationError):
        patched.setattr(reservation, "replace_file", fail)
        own.reserve(["GPU-1"], "free:1", ["GPU-1"], "a")
    own.set_run_name("b")
    [found] = read_reservations()
    assert (found.run, found.gpus) == ("b", ())
    own.release()


def test_run_folder_is_shown_to_its_user_only(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Reservation()
    own.set_terms(QueueTerms(folder="/home/me/secret/run"))
    own.enqueue("free:1", ["GPU-1"], "run")
    [found] = read_reservations()
    assert found.run_folder() == "/home/me/secret/run"
    readable = [path for path in base.glob("gputrain-*/*") if path.stat().st_mode & 0o044]
    assert len(readable) == 2 and not any("secret" in path.read_text() for path in readable)
    monkeypatch.setattr(os, "geteuid", lambda: found.uid + 1)
    assert found.run_folder() == ""
    own.release()
    assert list(base.iterdir()) == []


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


def test_lock_of_user_is_exclusive_and_not_waited_for_too_long(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_WAIT_SECONDS", 0.0)
    with user_lock(), user_lock():
        [folder] = base.iterdir()
        with files.opened(folder, os.O_RDONLY) as handle:
            assert files.has_flock(handle)


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


def test_folder_without_write_locks_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patched, raises_problem("not-writable", "device.gpus", "GPUTRAIN_RESERVATIONS"):
        patched.setattr(fcntl, "fcntl", refuse)
        Reservation().enqueue("free:1", ["GPU-1"], "a")
    assert list(base.iterdir()) == []


def test_rejoining_the_queue_moves_the_run_to_its_end(base: Path) -> None:
    own = Reservation()
    own.enqueue("free:1", ["GPU-1"], "a")
    before = read_reservations()[0].since
    own.rejoin()
    [after] = read_reservations()
    assert after.since > before and after.key == own.key
    own.release()
