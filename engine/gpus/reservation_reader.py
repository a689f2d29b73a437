"""Reservations of all users of the host, as other processes see them.

Any user can create files in BASE, see `reservation`. Therefore nothing here blocks, follows a link or trusts what a
file claims about its user:

- An entry is a regular file that belongs to the user in the name of its folder. So does the folder.
- Its size, the number of entries of a user and the types of its values are limited.
- What is held never looks free. An entry whose lock is held counts as held although the rest of it cannot be read, for
  example because a later gputrain wrote it: its GPUs are its first field. A user with more entries than are read counts
  as holding every GPU.
- A run is live if the process that created its lock file holds a write lock on it. Other users cannot: the file is
  writable only by its owner.
- A run joined the queue when its lock file was created, or later.
- The order in which a user wants their runs to start, and `blocked`, only permute or disable runs of that user.
- A rank belongs to the run only if its process belongs to the same user.

What cannot be read is reported. A malicious user of this host can therefore only make GPUs look reserved by themselves,
or claimed by a waiting run of theirs. Both are shown with their name. `--gpus` with indices or UUIDs shares such GPUs.

`reservation` writes the entries. `allocation`, `sampler`, `engine.doctor` and the form read them here.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from engine.gpus.reservation_entry import (
    EVERY_DEVICE,
    MAX_RANKS_PER_USER,
    ReservationEntry,
    ReservationInfo,
    held_devices,
    reservations_root,
    unreadable_entry,
)
from engine.utils.codec import InvalidRecordError, UnsetType, asdict, decode, replace
from engine.utils.errors import Problem
from engine.utils.files import open_regular_file, opened
from engine.utils.locks import has_write_lock
from engine.utils.text import pluralize, printable
from engine.utils.trust import describe_user

MAX_ENTRY_BYTES = 1 << 16  # eight GPUs with seven MIG instances each need 16 KiB
MAX_FILES_PER_FOLDER = 16384  # three per run
MAX_BYTES_PER_USER = 1 << 22
MAX_FOLDERS_PER_USER = 4
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
        # By user.
        self._num_folders: dict[int, int] = {}
        self._num_ranks: dict[int, int] = {}
        self._num_bytes: dict[int, int] = {}
        self._unread: dict[tuple[int, bool], tuple[int, str]] = {}
        """The number of their entries that cannot be read, by whether these count as held, and why for the first."""

    def read(self) -> None:
        """Raises OSError if the root cannot be listed."""
        with opened(self._root, os.O_RDONLY | os.O_DIRECTORY) as root_fd, os.scandir(root_fd) as listing:
            for entry in listing:
                if match := FOLDER_NAME.fullmatch(entry.name):
                    self._read_folder(root_fd, entry.name, int(match[1]))

    def problems(self) -> list[Problem]:
        return [
            Problem(
                "",
                f"{'counted as held' if is_held else 'ignored'}: {pluralize(count, 'invalid GPU reservation')} of "
                f"{describe_user(uid)} in {self._root}: {'' if count == 1 else 'for example, '}{reason}",
                "only that user can remove them",
                code="damaged",
            )
            for (uid, is_held), (count, reason) in self._unread.items()
        ]

    def _note(self, uid: int, name: str, reason: str, *, is_held: bool = False) -> None:
        """Note that an entry of a user cannot be read, and whether it counts as held or is ignored."""
        shown = printable(name) if len(name) <= MAX_SHOWN_CHARS else f"{printable(name[:MAX_SHOWN_CHARS])}…"
        count, first_reason = self._unread.get((uid, is_held), (0, f"{shown} {reason}"))
        self._unread[uid, is_held] = count + 1, first_reason

    def _read_folder(self, root_fd: int, name: str, uid: int) -> None:
        owner = uid
        try:
            # A link, or a named pipe, is not opened at all.
            status = os.stat(name, dir_fd=root_fd, follow_symlinks=False)
            owner = status.st_uid
            if (reason := self._why_not_folder_of(uid, status)) is not None:
                return self._note(owner, name, reason)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._note(owner, name, f"cannot be opened ({error.strerror})")
        try:
            # Between the two calls, its owner may have replaced it.
            if os.fstat(folder).st_uid == uid:
                self._read_entries(folder, name, uid)
        except OSError as error:
            self._note(uid, name, f"cannot be listed ({error.strerror})")
        finally:
            os.close(folder)

    def _why_not_folder_of(self, uid: int, status: os.stat_result) -> str | None:
        """Return why a folder is not read, as a clause that follows its name; None if it is read."""
        if not stat.S_ISDIR(status.st_mode):
            return "is not a folder"
        if status.st_uid != uid:
            return f"does not belong to {describe_user(uid)}"
        self._num_folders[uid] = self._num_folders.get(uid, 0) + 1
        if self._num_folders[uid] > MAX_FOLDERS_PER_USER:
            return f"is one of more than {pluralize(MAX_FOLDERS_PER_USER, 'folder')}"
        return None

    def _read_entries(self, folder: int, name: str, uid: int) -> None:
        with os.scandir(folder) as listing:
            names = [entry.name for entry in islice(listing, MAX_FILES_PER_FOLDER + 1)]
        if len(names) > MAX_FILES_PER_FOLDER:
            self._hold_every_device(uid, name, f"has more than {MAX_FILES_PER_FOLDER} files")
        for lock_name in names[:MAX_FILES_PER_FOLDER]:
            if not lock_name.endswith(".lock"):
                continue
            try:
                reservation = self._read_entry(folder, lock_name, uid, name)
            except FileNotFoundError:
                # Released in the meantime.
                continue
            except OSError as error:
                if not isinstance(error, PermissionError) or not _is_recent(folder, lock_name):
                    self._note(uid, f"{name}/{lock_name}", f"cannot be used ({error.strerror})")
            except ValueError as error:
                self._note(uid, f"{name}/{_json_name(lock_name)}", str(error))
            else:
                self.reservations += [reservation] if reservation is not None else []
            if self._num_bytes.get(uid, 0) > MAX_BYTES_PER_USER:
                self._hold_every_device(uid, name, f"has entries of more than {MAX_BYTES_PER_USER} bytes")
                break

    def _hold_every_device(self, uid: int, name: str, reason: str) -> None:
        """Let a user hold every device, some of whose entries are not read."""
        self._note(uid, name, reason, is_held=True)
        entry = unreadable_entry((EVERY_DEVICE,))
        self.reservations.append(_info(entry, uid=uid, user_folder=name, lock_name="", since=0.0))

    def _read_entry(self, folder: int, lock_name: str, uid: int, name: str) -> ReservationInfo | None:
        """Return the reservation of a lock file; None if no process holds it.

        Raises OSError if its files cannot be read, and ValueError if they are invalid.
        """
        with open_regular_file(lock_name, dir_fd=folder) as lock:
            status = os.fstat(lock.fileno())
            if status.st_uid != uid:
                raise OSError(errno.EINVAL, f"belongs to {describe_user(status.st_uid)}")
            if has_write_lock(lock.fileno()):
                data, renewed_at = _read_file(folder, _json_name(lock_name), uid)
                self._num_bytes[uid] = self._num_bytes.get(uid, 0) + len(data)
                entry = self._parse(data, uid, f"{name}/{_json_name(lock_name)}")
                return _info(
                    entry,
                    uid=uid,
                    user_folder=name,
                    lock_name=lock_name,
                    since=max(entry.since, status.st_ctime),
                    renewed_at=renewed_at,
                    is_silent=time.time() - renewed_at > SILENT_SECONDS,
                )
        is_published = status.st_mode & stat.S_IROTH or time.time() - status.st_ctime > UNPUBLISHED_SECONDS
        if uid == os.getuid() and is_published:
            self.stale.append(self._root / name / lock_name)
            if self._remove_stale:
                remove_entry(self._root / name, lock_name)
        return None

    def _parse(self, data: bytes, uid: int, name: str) -> ReservationEntry:
        """Return an entry, or what counts as held of one that cannot be read. Raises ValueError if that is nothing."""
        try:
            entry = decode(data, ReservationEntry)
        except InvalidRecordError as error:
            if not (gpus := held_devices(data)):
                raise
            self._note(uid, name, str(error), is_held=True)
            return unreadable_entry(gpus)
        num_ranks = self._num_ranks.get(uid, 0) + len(entry.ranks)
        if num_ranks > MAX_RANKS_PER_USER:
            self._note(uid, name, f"exceeds {MAX_RANKS_PER_USER} ranks", is_held=True)
            return replace(entry, ranks=())
        self._num_ranks[uid] = num_ranks
        return entry


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


def _json_name(lock_name: str) -> str:
    return f"{lock_name.removesuffix('.lock')}.json"


def _is_recent(folder: int, lock_name: str) -> bool:
    """Whether a lock file may not be published yet, or was removed in the meantime."""
    try:
        return time.time() - os.stat(lock_name, dir_fd=folder).st_ctime < UNPUBLISHED_SECONDS
    except OSError:
        return True


def _read_file(folder: int, name: str, uid: int) -> tuple[bytes, float]:
    """Return the beginning of a file of a user, and when it was last renewed. Raises OSError and ValueError."""
    try:
        with open_regular_file(name, dir_fd=folder) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != uid:
                raise ValueError("belongs to another user")
            return file.read(MAX_ENTRY_BYTES), status.st_mtime
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be used ({error.strerror})") from error


def _may_be_process_of(pid: int, uid: int) -> bool:
    """Whether a process belongs to a user, or does not exist here: it may be in another container."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid == uid
    except OSError:
        return True
