"""Locks of a folder as its owner, other processes and other users see them."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base.locks import _FLOCK, LOCK_POLL_SECONDS, FileLock, OwnerLock, is_held

STRANGER = 12345

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    # Others cannot enter pytest's folders.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def take(folder: Path) -> OwnerLock | None:
    return OwnerLock.take(folder / "lock", folder / ".lock")


def owned(folder: Path) -> OwnerLock:
    lock = take(folder)
    assert lock is not None
    lock.publish()
    return lock


@pytest.fixture
def stranger_locks(folder: Path) -> Iterator[list[int]]:
    """What another user can hold: descriptors that they have opened for reading, with every lock that these take."""
    held = list[int]()
    yield held
    for each in held:
        os.close(each)


def lock_as_stranger(path: Path, held: list[int]) -> None:
    """Take an `flock` and a read lock on a file as another user, who can only read it."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(STRANGER)
    os.seteuid(STRANGER)
    try:
        fd = os.open(path, os.O_RDONLY)
        with pytest.raises(PermissionError):
            os.open(path, os.O_RDWR)
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
    held.append(fd)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))


def test_lock_has_one_owner_and_shows_whether_it_lives(folder: Path) -> None:
    lock = owned(folder)
    assert is_held(folder / "lock") and take(folder) is None
    assert (folder / "lock").stat().st_mode & 0o777 == 0o644
    assert (folder / ".lock").stat().st_mode & 0o777 == 0o600
    lock.close()
    assert not is_held(folder / "lock")
    owned(folder).close()


@needs_root
def test_stranger_who_locks_the_readable_file_neither_owns_it_nor_keeps_it(
    folder: Path, stranger_locks: list[int]
) -> None:
    owned(folder).close()
    lock_as_stranger(folder / "lock", stranger_locks)
    assert not is_held(folder / "lock")
    lock = owned(folder)
    assert lock.has_write_lock and is_held(folder / "lock")
    lock.close()
    with pytest.raises(PermissionError):
        lock_as_stranger(folder / ".lock", stranger_locks)


@pytest.mark.parametrize("deleted", [("lock",), (".lock",), ("lock", ".lock")], ids=str)
def test_owner_writes_deleted_files_again(folder: Path, deleted: tuple[str, ...]) -> None:
    lock = owned(folder)
    for name in deleted:
        (folder / name).unlink()
    lock.renew()
    assert is_held(folder / "lock") and take(folder) is None
    lock.close()
    owned(folder).close()


def test_process_that_took_a_deleted_lock_sees_that_its_owner_lives(folder: Path) -> None:
    lock = owned(folder)
    for name in ("lock", ".lock"):
        (folder / name).unlink()
    second = take(folder)
    assert second is not None and not second.is_taken()
    lock.renew()
    assert second.is_taken()
    second.close()
    lock.close()


def test_files_are_not_empty_so_that_cleanups_leave_them(folder: Path) -> None:
    owned(folder).close()
    assert all((folder / name).stat().st_size for name in ("lock", ".lock"))


def test_file_lock_waits_for_its_holder_who_can_take_it_again(tmp_path: Path) -> None:
    held, other, taken = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock"), threading.Event()

    def take() -> None:
        with other:
            taken.set()

    thread = threading.Thread(target=take)
    with held:
        with held:
            thread.start()
        assert not taken.wait(3 * LOCK_POLL_SECONDS)
    thread.join()
    assert taken.is_set()
