"""The reservation of this process: GPUs of a run, or its place in the queue of runs that wait for GPUs.

Every run that trains on GPUs keeps a JSON file and a lock file in `BASE/gputrain-UID/`. BASE is $GPUTRAIN_RESERVATIONS,
else `reservations` of the user's settings, else /tmp; containers and jobs that share GPUs should share it. If several
users can write to it, it must be sticky, like /tmp. If another user has taken the name of the folder, the files are in
`BASE/gputrain-UID-SUFFIX/`, which only this version of gputrain reads. The run holds locks on the lock file for its
lifetime, so the kernel releases the reservation however the process ends. A third file, which only its user can read,
has the run folder.

There is no lock of the host: whoever holds it could delay all runs. Two runs may therefore reserve the same GPU at the
same time: `allocation` reads the reservations again after it has written its own, and one of the two finds the other.

`allocation` writes reservations, `reservation_reader` reads them.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from engine.base.codec import asdict, encode, replace, to_builtins
from engine.base.errors import UsageError
from engine.base.files import locked_folder, replace_file
from engine.base.locks import take_write_lock
from engine.gpus.queue_terms import MAX_STRING_CHARS, QueueTerms
from engine.gpus.reservation_entry import ReservationEntry, ReservedRank, reservations_root
from engine.gpus.reservation_reader import remove_entry

# Shows that the supervisor answers, and keeps the files: by default systemd-tmpfiles deletes those in /tmp that have
# not been touched for 10 days.
BEAT_SECONDS = 10.0


class ReservationError(UsageError):
    """A reservation cannot be written."""


class Reservation:
    """Reservation of this process, visible to other processes from `enqueue` or `reserve` to `release`."""

    def __init__(self) -> None:
        self._lock_path: Path | None = None
        self._lock_fd = -1
        self._entry = ReservationEntry(
            run="",
            since=0.0,
            selection="",
            visible=(),
            gpus=(),
            ranks=(),
            **asdict(QueueTerms()),
        )
        """What is written while there is a lock file."""
        self._renewed_at, self._shown_folder = 0.0, ""

    def set_terms(self, terms: QueueTerms, reason: str | None = None) -> None:
        """Publish the terms on which the run waits, and why it waits. Before `enqueue`, only keep them."""
        changes = asdict(terms) | ({} if reason is None else {"reason": reason[:MAX_STRING_CHARS]})
        if replace(self._entry, **changes) != self._entry:
            self._publish(**changes)

    def rejoin(self) -> None:
        """Go to the end of the queue, whose order is that of this time, or of the lock file if that is later."""
        self._publish(since=time.time())

    def enqueue(self, selection: str, visible: Sequence[str], run: str) -> None:
        """Join the queue for GPUs, or return to the same place in it. Raises UsageError if it cannot be written."""
        self.reserve((), selection, visible, run)

    def reserve(self, gpus: Sequence[str], selection: str, visible: Sequence[str], run: str) -> None:
        """Reserve devices by UUID. Raises UsageError if it cannot be written."""
        devices = tuple(gpus), tuple(visible)
        if self._lock_path is None:
            self._create(selection, visible, run)
        elif (self._entry.gpus, self._entry.visible) == devices:
            return
        before = self._entry
        self._entry = replace(before, gpus=devices[0], visible=devices[1])
        try:
            self._write()
        except UsageError:
            self._entry = before
            raise

    def _create(self, selection: str, visible: Sequence[str], run: str) -> None:
        self._lock()
        self._entry = replace(
            self._entry,
            run=run,
            since=time.time(),
            selection=selection,
            visible=tuple(visible),
            gpus=(),
            ranks=(),
        )

    def _lock(self) -> None:
        """Create a lock file and lock it. Raises UsageError."""
        try:
            lock_path, lock_fd = _create_lock()
        except OSError as error:
            raise _unusable(reservations_root(), error) from error
        try:
            if not take_write_lock(lock_fd):
                raise OSError(errno.ENOLCK, "its file system has no write locks")
            # Other users cannot open, and so not lock, the file before.
            os.fchmod(lock_fd, 0o644)
        except OSError as error:
            remove_entry(lock_path.parent, lock_path.name)
            os.close(lock_fd)
            raise _unusable(lock_path, error) from error
        self._lock_path, self._lock_fd, self._shown_folder = lock_path, lock_fd, ""

    @property
    def key(self) -> tuple[int, str] | None:
        """Same as `ReservationInfo.key`; None before `enqueue` and `reserve`."""
        return None if self._lock_path is None else (os.getuid(), self._lock_path.name)

    @property
    def since(self) -> float:
        """Unix time at which the run joined the queue, 0 before."""
        return self._entry.since

    def set_run_name(self, run: str) -> None:
        """Update the run name that other processes see."""
        self._publish(run=run)

    def publish_ranks(self, ranks: Sequence[ReservedRank]) -> None:
        """Publish the PIDs and devices of the ranks, so that the sampler can attribute GPU processes to this run."""
        self._publish(ranks=tuple(ranks))

    def renew(self) -> None:
        """Show that this process answers, and write the reservation again if somebody has deleted it.

        To be called at least once per second, so that what a run holds never looks free for long."""
        if self._lock_path is None:
            return
        if not self._exists():
            self._publish()
        elif time.monotonic() - self._renewed_at > BEAT_SECONDS:
            self._renewed_at = time.monotonic()
            with suppress(OSError):
                os.utime(self._lock_path.with_suffix(".json"))
                # Changes the time of access only: the ctime of the lock file is the run's arrival in the queue.
                os.pread(self._lock_fd, 1, 0)
                os.utime(self._lock_path.with_suffix(".folder"))

    def _exists(self, suffixes: Sequence[str] = (".lock", ".json")) -> bool:
        """Whether nobody has deleted or replaced the files."""
        assert self._lock_path is not None  # noqa: S101 - set by `_lock`
        try:
            found = [self._lock_path.with_suffix(suffix).stat() for suffix in suffixes]
            return os.path.samestat(found[0], os.fstat(self._lock_fd))
        except OSError:
            return False

    def release(self) -> None:
        """Release the devices and remove all files. Idempotent."""
        if self._lock_path is None:
            return
        lock, self._lock_path = self._lock_path, None
        remove_entry(lock.parent, lock.name)
        os.close(self._lock_fd)

    def _publish(self, **changes: Any) -> None:
        """Change the entry, ignoring errors: information for other users is not worth failing a run."""
        self._entry = replace(self._entry, **changes)
        with suppress(UsageError):
            self._write()

    def _write(self) -> None:
        """Write the JSON file atomically. Raises UsageError if it cannot be written."""
        if self._lock_path is None:
            return
        if not self._exists((".lock",)):
            old_path, old_fd = self._lock_path, self._lock_fd
            self._lock()
            self._entry = replace(self._entry, since=time.time())
            remove_entry(old_path.parent, old_path.name)
            os.close(old_fd)
        path, values = self._lock_path.with_suffix(".json"), to_builtins(self._entry)
        folder = values.pop("folder")
        try:
            if folder != self._shown_folder:
                replace_file(path.with_suffix(".folder"), lambda file: file.write(os.fsencode(folder)), private=True)
                self._shown_folder = folder
            replace_file(path, lambda file: _write_world_readable(file, encode(values)))
        except OSError as error:
            raise _unusable(path, error) from error


def _create_lock() -> tuple[Path, int]:
    """Create and open a lock file of a unique name. Raises OSError or UsageError."""
    while True:
        # Another run of this user may end and remove the empty folder in the meantime.
        with suppress(FileNotFoundError):
            path = _user_folder() / f"{os.getpid()}-{time.time_ns()}.lock"
            return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write_world_readable(file: BinaryIO, data: bytes) -> None:
    """Write `data` to a file that all users can read.

    The mode is set before `replace_file` renames the file, so other users never see an unreadable file.
    """
    os.fchmod(file.fileno(), 0o644)
    file.write(data)


def _user_folder() -> Path:
    """Return a folder that belongs to this user, and that only this user can write to. Raises OSError or UsageError."""
    root, name = reservations_root(), f"gputrain-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            (root / name).mkdir(mode=0o755)
        # Where another user has taken the first name, the first folder that this user owns, or a new one.
        for folder in (root / name, *sorted(root.glob(f"{name}-*"))):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                folder.chmod(0o755)
                return folder
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))
        folder.chmod(0o755)
    except FileNotFoundError as error:
        if root.is_dir():
            raise
        raise _unusable(root, error) from error
    except OSError as error:
        raise _unusable(root / name, error) from error
    return folder


def _unusable(path: Path, error: OSError) -> UsageError:
    return ReservationError.one(
        "device.gpus",
        f"GPUs cannot be reserved in {path}: {error.strerror}; set GPUTRAIN_RESERVATIONS to another folder, the same "
        "for all users of this host",
        code="not-writable",
    )


@contextmanager
def user_lock() -> Iterator[None]:
    """Hold the lock of this user while GPUs are selected, so that two runs do not exceed a limit of theirs together.

    Whoever holds it too long is not waited for: a suspended run must not stop the others.
    """
    with ExitStack() as stack:
        with suppress(OSError, UsageError):
            stack.enter_context(locked_folder(_user_folder()))
        yield
