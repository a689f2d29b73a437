"""Locks that other users can neither take nor imitate.

Who can read a file can take an `flock`, or a read lock, on it and keep it for as long as they like. A write lock
(`F_OFD_SETLK` of fcntl(2)) needs a file that is open for writing, so on a file of mode 0644 it shows all users that its
owner lives. `engine.runs.ownership` and `engine.jobs.sweeps.folder` use `OwnerLock`. `engine.gpus.reservation` uses
only the write lock: each of its files is new.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from contextlib import suppress
from pathlib import Path

from engine.base.files import opened

LOCK_POLL_SECONDS = 0.02
# struct flock of fcntl(2): l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi")
# Cleanups delete empty files (`find -empty -delete`).
_CONTENT = b"locked while its owner lives\n"


def take_write_lock(lock_fd: int) -> bool:
    """Take the write lock on a file, which only its owner can open for writing. False if there are no such locks."""
    try:
        fcntl.fcntl(lock_fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return False
    return True


def has_write_lock(lock_fd: int) -> bool:
    """Whether a process holds the write lock on a file. Raises OSError."""
    answer = fcntl.fcntl(lock_fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack_from(answer)[0] == fcntl.F_WRLCK)


def is_held(path: Path) -> bool:
    """Whether the owner of a lock file lives. Raises OSError, also where there are no write locks."""
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as lock_fd:
        return has_write_lock(lock_fd)


class OwnerLock:
    """A lock that no other user can hold, while all users see whether its owner lives.

    The `flock` on `private_path`, which only its user can open, decides who owns it. From `publish` on, the write lock
    on `path` shows it to others, unless the file system has no such locks.
    """

    def __init__(self, path: Path, private_path: Path, private_fd: int) -> None:
        self._path, self._private_path, self._private_fd = path, private_path, private_fd
        self.fd: int | None = None
        """Descriptor of `path`, None before it is published."""
        self.has_write_lock = False

    @classmethod
    def take(cls, path: Path, private_path: Path) -> OwnerLock | None:
        """Take the lock without showing it to others yet; None if another process holds it. Raises OSError."""
        if (private_fd := try_flock(private_path)) is None:
            return None
        lock = cls(path, private_path, private_fd)
        # Somebody may have deleted the private file of a live owner.
        if not lock.is_taken():
            return lock
        lock.close()
        return None

    def is_taken(self) -> bool:
        """Whether another process shows that it owns it, which has written `path` again after it was deleted."""
        if self.has_write_lock and self.fd is not None and _is_file(self.fd, self._path):
            return False
        try:
            return is_held(self._path)
        except OSError:
            return False

    def publish(self) -> None:
        """Show others that the owner lives. Raises OSError.

        The file is a new one, on which nobody else can hold a lock yet."""
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.unlink(missing_ok=True)
        new_fd = _create(temporary)
        try:
            self.has_write_lock = take_write_lock(new_fd)
            os.fchmod(new_fd, 0o600 | (self._path.parent.stat().st_mode & 0o044))
            temporary.replace(self._path)
        except BaseException:
            os.close(new_fd)
            raise
        if self.fd is not None:
            os.close(self.fd)
        self.fd = new_fd

    def renew(self) -> None:
        """Write the files again if somebody has deleted them. Errors are ignored: the next call tries again."""
        with suppress(OSError):
            if self.fd is None or not _is_file(self.fd, self._path):
                self.publish()
            is_private = _is_file(self._private_fd, self._private_path)
            if not is_private and (private_fd := try_flock(self._private_path)) is not None:
                os.close(self._private_fd)
                self._private_fd = private_fd

    def close(self) -> None:
        """Release the lock. A process that was forked meanwhile keeps it until it ends."""
        for each in (self.fd, self._private_fd):
            if each is not None:
                os.close(each)


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


class FileLock:
    """A lock that one process holds at a time, on a private file; its holder can take it again."""

    def __init__(self, path: Path) -> None:
        self._path, self._depth, self._fd = path, 0, -1

    def acquire(self) -> bool:
        """Wait for the lock. Raises OSError."""
        if self._depth == 0:
            while (fd := try_flock(self._path)) is None:
                time.sleep(LOCK_POLL_SECONDS)
            self._fd = fd
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            os.close(self._fd)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def try_flock(path: Path) -> int | None:
    """Return a descriptor of a private file that holds its `flock`; None if another process holds it or has deleted the
    file. Raises OSError."""
    try:
        fd = _create(path)
    except FileExistsError:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_file(fd, path):
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _create(path: Path) -> int:
    """Create a private file, which belongs to the owner of its folder also if root creates it. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with suppress(OSError):
        os.write(fd, _CONTENT)
        if os.geteuid() == 0:
            folder = path.parent.stat()
            os.fchown(fd, folder.st_uid, folder.st_gid)
    return fd
