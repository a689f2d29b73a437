"""Reservations of all users of the host, as other processes see them.

Any user can create files in BASE, see `reservation`. Therefore nothing here blocks, follows a link or trusts what a
file claims about its user:

- An entry is a regular file that belongs to the user in the name of its folder. So does the folder.
- Its size, the number of entries of a user and the types of its values are limited.
- A run is live if the process that created its lock file holds a write lock on it. Other users cannot: the file is
  writable only by its owner.
- A run joined the queue when its lock file was created, or later.
- The order in which a user wants their runs to start, and `blocked`, only permute or disable runs of that user.
- A rank belongs to the run only if its process belongs to the same user.

What cannot be read is reported. A malicious user of this host can therefore only make GPUs look reserved by themselves,
or claimed by a waiting run of theirs. Both are shown with their name. `--gpus` with indices or UUIDs shares such GPUs.

`reservation` writes the entries. `allocation`, `sampler`, `engine.jobs.doctor` and the form read them here.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from engine.base.codec import UnsetType, asdict, decode, replace
from engine.base.errors import Problem
from engine.base.files import open_regular_file, opened
from engine.base.locks import has_write_lock
from engine.base.text import pluralize, printable
from engine.base.trust import describe_user
from engine.gpus.reservation_entry import ReservationEntry, ReservationInfo, reservations_root

MAX_ENTRY_BYTES = 1 << 16  # eight GPUs with seven MIG instances each need 16 KiB
MAX_FILES_PER_USER = 16384  # three per run
MAX_BYTES_PER_USER = 1 << 22
MAX_SHOWN_CHARS = 100
UNPUBLISHED_SECONDS = 60.0
READ_PER_SECOND = 10  # an entry takes 50 µs, and each run that waits reads all
# A supervisor renews its entry every few seconds, see `reservation.BEAT_SECONDS`. After this time it does not answer.
SILENT_SECONDS = 60.0
FOLDER_NAME = re.compile(r"gputrain-([0-9]{1,10})(-.*)?", re.DOTALL)


def remove_entry(folder: Path, lock_name: str) -> None:
    """Remove the files of a reservation of this user, and the folder if it was the last one."""
    for suffix in (".json", ".folder", ".lock"):
        with suppress(OSError):
            (folder / lock_name).with_suffix(suffix).unlink()
    with suppress(OSError):
        folder.rmdir()


def read_reservations(
    *, remove_stale: bool = False, report: Callable[[Problem], object] = lambda _: None
) -> list[ReservationInfo]:
    """Return the reservations of the live runs of all users, in queue order. Never raises.

    With `remove_stale`, also delete files that dead runs of this user left. `report` receives a problem for each user
    whose entries are not valid.
    """
    reader = _Reader(reservations_root(), remove_stale)
    with suppress(OSError):
        reader.read()
    for problem in reader.problems():
        report(problem)
    return sorted(reader.reservations, key=lambda reservation: (reservation.since, reservation.key))


class PolledReservations:
    """The reservations of all users for a run that reads them once per second.

    As long as nobody writes or removes one, those of hundreds of runs are read less often than that: of a run that was
    killed, only the lock changes."""

    def __init__(self) -> None:
        self._found: list[ReservationInfo] = []
        self._stamp: list[tuple[str, int]] = []
        self._read_at = -math.inf

    def read(self, report: Callable[[Problem], object]) -> list[ReservationInfo]:
        """Return the reservations, as `read_reservations` does."""
        stamp, now = _folder_times(reservations_root()), time.monotonic()
        if stamp != self._stamp or now - self._read_at > len(self._found) / READ_PER_SECOND:
            self._found = read_reservations(remove_stale=True, report=report)
            self._stamp, self._read_at = stamp, now
        return self._found


def _folder_times(root: Path) -> list[tuple[str, int]]:
    """Return when entries were last written or removed, by the folders of all users."""
    times = list[tuple[str, int]]()
    with suppress(OSError), os.scandir(root) as listing:
        for entry in listing:
            if FOLDER_NAME.fullmatch(entry.name):
                times.append((entry.name, entry.stat(follow_symlinks=False).st_mtime_ns))
    return sorted(times)


def dead_reservations() -> list[Path]:
    """Return the lock files that dead runs of this user left, which `read_reservations` removes. Never raises."""
    reader = _Reader(reservations_root(), remove_stale=False)
    with suppress(OSError):
        reader.read()
    return reader.stale


class _Reader:
    """One pass over all folders."""

    def __init__(self, root: Path, remove_stale: bool) -> None:
        self.reservations: list[ReservationInfo] = []
        self.stale: list[Path] = []
        """The lock files that dead runs of this user left."""
        self._root, self._remove_stale = root, remove_stale
        self._num_files, self._num_bytes = Counter[int](), Counter[int]()
        """What was found and read of each user."""
        self._unread: dict[int, tuple[int, str]] = {}
        """How many entries cannot be read, and why not the first, by the user to whom they belong."""

    def read(self) -> None:
        """Raises OSError if the root cannot be listed."""
        with os.scandir(self._root) as listing:
            for entry in listing:
                if match := FOLDER_NAME.fullmatch(entry.name):
                    self._read_folder(entry.name, int(match[1]))

    def problems(self) -> list[Problem]:
        return [
            Problem(
                "",
                f"ignored: {pluralize(count, 'invalid GPU reservation')} of {describe_user(uid)} in "
                f"{self._root}: {'' if count == 1 else 'for example, '}{reason}",
                "only that user can remove them",
                code="damaged",
            )
            for uid, (count, reason) in self._unread.items()
        ]

    def _note(self, uid: int, name: str, error: OSError | ValueError) -> None:
        """Note that an entry of a user cannot be read."""
        reason = f"cannot be used ({error.strerror})" if isinstance(error, OSError) else str(error)
        shown = printable(name) if len(name) <= MAX_SHOWN_CHARS else f"{printable(name[:MAX_SHOWN_CHARS])}…"
        count, first = self._unread.get(uid, (0, f"{shown} {reason}"))
        self._unread[uid] = count + 1, first

    def _count_files(self, uid: int, count: int) -> None:
        """Raises ValueError if a user has too many in all folders."""
        self._num_files[uid] += count
        if self._num_files[uid] > MAX_FILES_PER_USER:
            raise ValueError(f"is one of more than {MAX_FILES_PER_USER} files")

    def _read_folder(self, name: str, uid: int) -> None:
        path, owner = self._root / name, uid
        try:
            owner = path.lstat().st_uid
            self._count_files(owner, 1)
            # Anything but a folder, such as a link or a named pipe, is not opened.
            with opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
                _require_owner(os.fstat(folder), uid)
                self._read_entries(folder, name, uid)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._note(owner, name, error)

    def _read_entries(self, folder: int, name: str, uid: int) -> None:
        """Raises OSError if the folder cannot be listed, and ValueError if it has too many entries."""
        with os.scandir(folder) as listing:
            files = [entry.name for entry in islice(listing, MAX_FILES_PER_USER + 1)]
        self._count_files(uid, len(files))
        for lock_name in (each for each in files if each.endswith(".lock")):
            if self._num_bytes[uid] > MAX_BYTES_PER_USER:
                raise ValueError(f"has entries of more than {MAX_BYTES_PER_USER} bytes")
            try:
                self._read_entry(folder, lock_name, uid, name)
            except FileNotFoundError:
                # Released in the meantime.
                continue
            except (OSError, ValueError) as error:
                if not isinstance(error, PermissionError) or not _is_recent(folder, lock_name):
                    self._note(uid, f"{name}/{lock_name}", error)

    def _read_entry(self, folder: int, lock_name: str, uid: int, name: str) -> None:
        """Read the reservation of a lock file, unless no process holds it. Raises OSError and ValueError."""
        with open_regular_file(lock_name, dir_fd=folder) as lock:
            status = os.fstat(lock.fileno())
            _require_owner(status, uid)
            if not has_write_lock(lock.fileno()):
                is_published = status.st_mode & stat.S_IROTH or time.time() - status.st_ctime > UNPUBLISHED_SECONDS
                if uid == os.getuid() and is_published:
                    self.stale.append(self._root / name / lock_name)
                    if self._remove_stale:
                        remove_entry(self._root / name, lock_name)
                return
            with open_regular_file(f"{lock_name.removesuffix('.lock')}.json", dir_fd=folder) as file:
                written = os.fstat(file.fileno())
                _require_owner(written, uid)
                data = file.read(MAX_ENTRY_BYTES)
        self._num_bytes[uid] += len(data)
        entry = decode(data, ReservationEntry)
        self.reservations.append(
            _info(
                entry,
                uid=uid,
                user_folder=name,
                lock_name=lock_name,
                since=max(entry.since, status.st_ctime),
                renewed_at=written.st_mtime,
                is_silent=time.time() - written.st_mtime > SILENT_SECONDS,
            )
        )


def _require_owner(status: os.stat_result, uid: int) -> None:
    if status.st_uid != uid:
        raise ValueError(f"belongs to {describe_user(status.st_uid)}")


def _info(entry: ReservationEntry, **known: Any) -> ReservationInfo:
    """Return an entry with what is `known` of its files, as far as other users can trust it."""
    # All names that gputrain gives to runs are unchanged by this.
    run = re.sub(r"[^\w.+-]", "_", entry.run)[:MAX_SHOWN_CHARS]
    trusted = {
        "run": run,
        "ranks": tuple(replace(rank, run=run) for rank in entry.ranks if _may_be_process_of(rank.pid, known["uid"])),
        "position": entry.since if isinstance(entry.position, UnsetType) else entry.position,
    }
    return ReservationInfo(**(asdict(entry) | trusted | known))


def _is_recent(folder: int, lock_name: str) -> bool:
    """Whether a lock file may not be published yet, or was removed in the meantime."""
    try:
        return time.time() - os.stat(lock_name, dir_fd=folder).st_ctime < UNPUBLISHED_SECONDS
    except OSError:
        return True


def _may_be_process_of(pid: int, uid: int) -> bool:
    """Whether a process belongs to a user, or does not exist here: it may be in another container."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid == uid
    except OSError:
        return True
