"""Reservations of GPUs by the runs of a host, and the queue of runs that wait for GPUs.

Every run that trains on GPUs keeps a JSON file and a lock file in `BASE/gputrain-UID/`. BASE is $GPUTRAIN_RESERVATIONS
or /tmp; containers that share GPUs should share it. The run holds an flock on the lock file for its lifetime, so the
kernel releases the reservation however the process ends. `BASE/gputrain.lock` is held while GPUs are selected, so that
two runs never reserve the same GPU.

`allocation` writes reservations. `sampler`, `engine.doctor` and the form read them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine.utils.errors import UsageError
from engine.utils.files import is_locked, read_json, replace_file
from engine.utils.process import user_name

RESERVATION_FORMAT = 1
LOCK_TIMEOUT_SECONDS = 20.0
# By default systemd-tmpfiles deletes files from /tmp that have not been touched for 10 days.
TOUCH_INTERVAL_SECONDS = 3600.0


@dataclass(frozen=True)
class ReservedRank:
    """A rank of a run: its PID, and the UUID of its CUDA device."""

    run: str
    rank: int
    pid: int
    uuid: str


@dataclass(frozen=True)
class ReservationInfo:
    """The reservation of a live run.

    `gpus` contains the `CudaDevice.reservation_id` of each of its devices, and is empty while it waits. `visible`
    contains that of each device that is visible to it. `selection` is its `device.gpus`. `since` is the Unix time at
    which it joined the queue.
    """

    run: str
    user: str
    pid: int
    since: float
    selection: str
    visible: tuple[str, ...]
    gpus: tuple[str, ...]
    ranks: tuple[ReservedRank, ...]

    @property
    def is_waiting(self) -> bool:
        return not self.gpus

    @property
    def key(self) -> tuple[int, float]:
        """Unique key of the reservation: PID, and time of joining the queue."""
        return self.pid, self.since


def reservations_root() -> Path:
    """Return the folder in which all users of the host reserve GPUs: $GPUTRAIN_RESERVATIONS, or /tmp."""
    return Path(os.environ.get("GPUTRAIN_RESERVATIONS") or "/tmp")  # noqa: S108 (known to all users of the host)


class Reservation:
    """Reservation of this process, visible to other processes from `enqueue` to `release`."""

    def __init__(self) -> None:
        self._lock_path: Path | None = None
        self._lock_fd = -1
        self._values: dict[str, Any] = {}
        self._touched_at = 0.0

    def enqueue(self, selection: str, visible: Sequence[str], run: str) -> None:
        """Join the queue for GPUs. The caller holds `allocation_lock`.

        Does nothing if already queued. Raises UsageError if the reservation cannot be written.
        """
        if self._lock_path is not None:
            return
        try:
            lock = self._create_lock()
            os.fchmod(self._lock_fd, 0o644)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        except OSError as error:
            raise _unusable(reservations_root(), error) from error
        self._lock_path = lock
        self._values = {
            "format": RESERVATION_FORMAT,
            "run": run,
            "user": user_name(),
            "pid": os.getpid(),
            "since": time.time(),
            "wants": selection,
            "visible": list(visible),
            "gpus": [],
            "ranks": [],
        }
        self._write()

    def _create_lock(self) -> Path:
        """Create and open a lock file of a unique name. Raises OSError or UsageError."""
        for is_last_attempt in (False, False, True):
            try:
                lock = _user_folder() / f"{os.getpid()}-{time.time_ns()}.lock"
                self._lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                return lock
            except FileNotFoundError:
                # Another run of this user ended and removed the empty folder in the meantime.
                if is_last_attempt:
                    raise
        raise FileNotFoundError

    @property
    def key(self) -> tuple[int, float] | None:
        """Same as `ReservationInfo.key`; None before `enqueue`."""
        return None if self._lock_path is None else (self._values["pid"], self._values["since"])

    @property
    def since(self) -> float:
        return float(self._values["since"])

    def reserve(self, gpus: Sequence[str]) -> None:
        """Reserve devices by `reservation_id`. The caller holds `allocation_lock`.

        Raises UsageError if it cannot be written.
        """
        self._values["gpus"] = list(gpus)
        self._write()

    def set_run_name(self, run: str) -> None:
        """Update the run name that other processes see."""
        self._values["run"] = run
        self._write_best_effort()

    def publish_ranks(self, ranks: Sequence[ReservedRank]) -> None:
        """Publish the PIDs and devices of the ranks, so that the sampler can attribute GPU processes to this run."""
        self._values["ranks"] = [asdict(rank) for rank in ranks]
        self._write_best_effort()

    def touch(self) -> None:
        """Update the modification times once per TOUCH_INTERVAL_SECONDS, so that /tmp cleaners keep the files."""
        if self._lock_path is not None and time.monotonic() - self._touched_at > TOUCH_INTERVAL_SECONDS:
            self._touched_at = time.monotonic()
            with suppress(OSError):
                os.utime(self._lock_path)
                os.utime(self._lock_path.with_suffix(".json"))

    def release(self) -> None:
        """Release the devices and remove all files. Idempotent."""
        if self._lock_path is None:
            return
        lock, self._lock_path = self._lock_path, None
        _remove(lock)
        os.close(self._lock_fd)

    def _write_best_effort(self) -> None:
        """Write, ignoring errors: information for other users is not worth failing a run."""
        with suppress(UsageError):
            self._write()

    def _write(self) -> None:
        """Write the JSON file atomically. Raises UsageError if it cannot be written."""
        if self._lock_path is None:
            return
        self._touched_at = time.monotonic()
        path = self._lock_path.with_suffix(".json")
        try:
            data = json.dumps(self._values).encode()
            replace_file(path, lambda file: _write_world_readable(file, data))
        except OSError as error:
            raise _unusable(path, error) from error


def _write_world_readable(file: BinaryIO, data: bytes) -> None:
    """Write `data` to a file that all users can read.

    The mode is set before `replace_file` renames the file, so other users never see an unreadable file.
    """
    os.fchmod(file.fileno(), 0o644)
    file.write(data)


def _remove(lock: Path) -> None:
    with suppress(OSError):
        lock.with_suffix(".json").unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        # Fails unless this was the last reservation of the user.
        lock.parent.rmdir()


def _user_folder() -> Path:
    """Create and return this user's folder. Raises UsageError if other users own it or can write to it."""
    folder = reservations_root() / f"gputrain-{os.getuid()}"
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            raise UsageError.one(
                "device.gpus",
                f"the GPU reservation folder {folder} must be owned by you and not be writable by others; remove it, "
                "or set GPUTRAIN_RESERVATIONS to another folder",
            )
        folder.chmod(0o755)
    except FileNotFoundError:
        if reservations_root().is_dir():
            raise
        raise _unusable(folder, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))) from None
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError.one(
        "device.gpus",
        f"GPUs cannot be reserved in {path}: {error.strerror}; set GPUTRAIN_RESERVATIONS to another folder, the same "
        "for all users of this host",
    )


@contextmanager
def allocation_lock() -> Iterator[None]:
    """Hold the host-wide lock for the selection of GPUs. Raises UsageError after LOCK_TIMEOUT_SECONDS."""
    path = reservations_root() / "gputrain.lock"
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while (lock_fd := _lock_shared_file(path)) is None:
        if time.monotonic() > deadline:
            raise UsageError.one(
                "device.gpus",
                f"another process has locked {path} for {LOCK_TIMEOUT_SECONDS:.0f} s; find it with `fuser {path}`",
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        # Unlinked before it is unlocked, so that waiting processes notice by the inode and create a new file. In /tmp,
        # which is sticky, only the owner of the file can unlink it.
        with suppress(OSError):
            path.unlink()
        os.close(lock_fd)


def _lock_shared_file(path: Path) -> int | None:
    """Lock a file that any user may have created. Return its descriptor, None if another process holds the lock.

    Raises UsageError if the file cannot be created or opened.
    """
    try:
        # Creating and opening are separate: with fs.protected_regular, open() with O_CREAT fails for files of other
        # users in sticky folders such as /tmp.
        with suppress(FileExistsError):
            created_fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            os.fchmod(created_fd, 0o644)
            os.close(created_fd)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            # The process that held the lock has unlinked the file.
            return None
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def read_reservations(*, remove_stale: bool = False) -> list[ReservationInfo]:
    """Return the reservations of the live runs of all users, in queue order.

    With `remove_stale`, also delete files that dead runs of this user left. The caller then holds `allocation_lock`.
    """
    reservations = []
    for folder in reservations_root().glob("gputrain-*"):
        # Ignores folders whose owner is not the UID in their name: another user could have forged them.
        with suppress(OSError, ValueError):
            if folder.is_symlink() or folder.stat().st_uid != int(folder.name.removeprefix("gputrain-")):
                continue
            for lock in folder.glob("*.lock"):
                # A reservation that is released in the meantime must not hide the others.
                with suppress(OSError):
                    if is_locked(lock):
                        reservation = _parse(read_json(lock.with_suffix(".json")) or {})
                        reservations += [reservation] if reservation is not None else []
                    elif remove_stale and folder.stat().st_uid == os.getuid():
                        _remove(lock)
    return sorted(reservations, key=lambda reservation: reservation.since)


def _parse(values: dict[str, Any]) -> ReservationInfo | None:
    """Return the parsed reservation, None if it is malformed."""
    try:
        run = str(values["run"])
        ranks = tuple(
            ReservedRank(run, int(rank["rank"]), int(rank["pid"]), str(rank["uuid"])) for rank in values["ranks"]
        )
        return ReservationInfo(
            run=run,
            user=str(values["user"]),
            pid=int(values["pid"]),
            since=float(values["since"]),
            selection=str(values["wants"]),
            visible=tuple(map(str, values["visible"])),
            gpus=tuple(map(str, values["gpus"])),
            ranks=ranks,
        )
    except (ValueError, KeyError, TypeError):
        return None
