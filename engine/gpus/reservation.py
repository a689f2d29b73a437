"""Which runs of this host hold which GPUs, and which wait for some, so that two never take the same one.

Every run that trains on GPUs keeps a JSON file in `BASE/gputrain-UID/`, where BASE is $GPUTRAIN_RESERVATIONS or /tmp
(containers that share GPUs can share a folder), and holds the lock beside it for as long as it lives: a run that dies
in whatever way lets go of its GPUs with it. Who chooses holds `BASE/gputrain.lock` meanwhile.
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
# A file that nobody touches for days is taken away from /tmp on many systems.
TOUCH_INTERVAL_SECONDS = 3600.0


@dataclass(frozen=True)
class ReservedRank:
    """A rank of a run: its pid, and the device that CUDA gave it."""

    run: str
    rank: int
    pid: int
    uuid: str


@dataclass(frozen=True)
class ReservationInfo:
    """What a live run holds, or waits for where `gpus` is empty: `selection` is its `device.gpus`."""

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
        """What tells one entry from another."""
        return self.pid, self.since


def reservations_root() -> Path:
    return Path(os.environ.get("GPUTRAIN_RESERVATIONS") or "/tmp")  # noqa: S108 (known to all users of the host)


class Reservation:
    """This process's entry. It is there for others to see from `enqueue` to `release`."""

    def __init__(self) -> None:
        self._lock_path: Path | None = None
        self._lock_fd = -1
        self._values: dict[str, Any] = {}
        self._touched_at = 0.0

    def enqueue(self, selection: str, visible: Sequence[str], run: str) -> None:
        """Queue for GPUs; call it with `allocation_lock` held. Raises UsageError where it cannot be written."""
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
        """Raises OSError, UsageError."""
        for last in (False, False, True):
            try:
                lock = _user_folder() / f"{os.getpid()}-{time.time_ns()}.lock"
                self._lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                return lock
            except FileNotFoundError:
                # A run that ended took the empty folder away in between.
                if last:
                    raise
        raise FileNotFoundError

    @property
    def key(self) -> tuple[int, float] | None:
        """As in `ReservationInfo`; None before `enqueue`."""
        return None if self._lock_path is None else (self._values["pid"], self._values["since"])

    @property
    def since(self) -> float:
        return float(self._values["since"])

    def reserve(self, gpus: Sequence[str]) -> None:
        """Call it with `allocation_lock` held."""
        self._values["gpus"] = list(gpus)
        self._write()

    def set_run_name(self, run: str) -> None:
        """The run has its name now."""
        self._values["run"] = run
        self._write_best_effort()

    def publish_ranks(self, ranks: Sequence[ReservedRank]) -> None:
        self._values["ranks"] = [asdict(rank) for rank in ranks]
        self._write_best_effort()

    def touch(self) -> None:
        """Show now and then that the files are in use."""
        if self._lock_path is not None and time.monotonic() - self._touched_at > TOUCH_INTERVAL_SECONDS:
            self._touched_at = time.monotonic()
            with suppress(OSError):
                os.utime(self._lock_path)
                os.utime(self._lock_path.with_suffix(".json"))

    def release(self) -> None:
        """Let go; nothing is left. May be called again."""
        if self._lock_path is None:
            return
        lock, self._lock_path = self._lock_path, None
        _remove(lock)
        os.close(self._lock_fd)

    def _write_best_effort(self) -> None:
        """What others only like to know is no reason to end a run."""
        with suppress(UsageError):
            self._write()

    def _write(self) -> None:
        """Raises UsageError."""
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
    """Before the file has its name: no other user may find it closed to them for an instant."""
    os.fchmod(file.fileno(), 0o644)
    file.write(data)


def _remove(lock: Path) -> None:
    with suppress(OSError):
        lock.with_suffix(".json").unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        # The last one out takes the folder away.
        lock.parent.rmdir()


def _user_folder() -> Path:
    """Raises UsageError where it is not this user's alone to write to."""
    folder = reservations_root() / f"gputrain-{os.getuid()}"
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            raise UsageError.one(
                "device.gpus",
                f"{folder}, where GPUs are reserved, is not yours alone to write to; remove it, or name another folder "
                "in GPUTRAIN_RESERVATIONS",
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
        f"GPUs cannot be reserved in {path}: {error.strerror}; name another folder in GPUTRAIN_RESERVATIONS, the same "
        "for all users of this host",
    )


@contextmanager
def allocation_lock() -> Iterator[None]:
    """One process of the host at a time. Raises UsageError where another does not make way."""
    path = reservations_root() / "gputrain.lock"
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while (handle := _lock_shared_file(path)) is None:
        if time.monotonic() > deadline:
            raise UsageError.one(
                "device.gpus", f"another process has held {path} for {LOCK_TIMEOUT_SECONDS:.0f} s; see `fuser {path}`"
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        # Gone before it is let go of: who waits for it sees that, and makes another. Only its maker can, in /tmp.
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _lock_shared_file(path: Path) -> int | None:
    """A handle that holds the lock on a file that any user may have made; None where another holds it."""
    try:
        # Made and opened apart: Linux refuses to open another user's file in /tmp with O_CREAT.
        with suppress(FileExistsError):
            made = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            os.fchmod(made, 0o644)
            os.close(made)
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino == path.stat().st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def read_reservations(*, remove_stale: bool = False) -> list[ReservationInfo]:
    """What the live runs of all users hold or wait for, the first in line first. `remove_stale` also deletes what dead
    runs of this user left; call it with `allocation_lock` held."""
    found = []
    for folder in reservations_root().glob("gputrain-*"):
        # A folder that belongs to another than its name says is nobody's word.
        with suppress(OSError, ValueError):
            if folder.is_symlink() or folder.stat().st_uid != int(folder.name.removeprefix("gputrain-")):
                continue
            for lock in folder.glob("*.lock"):
                # One that goes meanwhile must not hide the others.
                with suppress(OSError):
                    if is_locked(lock):
                        held = _parse(read_json(lock.with_suffix(".json")) or {})
                        found += [held] if held is not None else []
                    elif remove_stale and folder.stat().st_uid == os.getuid():
                        _remove(lock)
    return sorted(found, key=lambda held: held.since)


def _parse(values: dict[str, Any]) -> ReservationInfo | None:
    """None where it makes no sense."""
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
