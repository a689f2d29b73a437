"""Reservations of all users of the host, as other processes see them.

Any user can create files in BASE, see `reservation`. Therefore nothing here blocks, follows a link or trusts what a
file claims about its user:

- An entry is a regular file that belongs to the user in the name of its folder. So does the folder.
- Its size, the number of entries of a user and the types of its values are limited.
- A run is live if the process that created its lock file holds a write lock on it. Other users cannot: the file is
  writable only by its owner. Where there are no such locks, it holds only an flock, which any reader of the file can
  take.
- A run joined the queue when its lock file was created, or later.
- The order in which a user wants their runs to start, and `blocked`, only permute or disable runs of that user.
- A rank belongs to the run only if its process belongs to the same user.

Invalid entries are reported and ignored. A malicious user of this host can therefore only make GPUs look reserved by
themselves, or claimed by a waiting run of theirs. Both are shown with their name. `--gpus` with indices or UUIDs shares
such GPUs.

`reservation` writes the entries. `allocation`, `sampler`, `engine.doctor` and the form read them here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Annotated

from engine.gpus.queue_terms import MAX_DEVICES, MAX_TIME, NumSharers, Priority, QueuePosition, QueueTerms, Text
from engine.utils.codec import FileRecord, Meta, Record, UnsetType, asdict, decode, replace
from engine.utils.errors import Problem, UsageError
from engine.utils.files import has_flock, open_regular_file, opened, settings_file
from engine.utils.text import pluralize, printable
from engine.utils.trust import describe_user, name_of_user

MAX_ENTRY_BYTES = 1 << 16  # eight GPUs with seven MIG instances each need 16 KiB
MAX_FILES_PER_FOLDER = 512  # two per run
MAX_FOLDERS_PER_USER = 4
MAX_RANKS_PER_USER = 1024
MAX_SHOWN_CHARS = 100
MAX_PID = 1 << 22  # PID_MAX_LIMIT of Linux
MAX_RANK = 1 << 20
UNPUBLISHED_SECONDS = 60.0
FOLDER_NAME = re.compile(r"gputrain-([0-9]{1,10})(-.*)?", re.DOTALL)
# struct flock of fcntl(2): l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi")


Devices = Annotated[tuple[str, ...], Meta(max_length=MAX_DEVICES)]
ArrivalTime = Annotated[float, Meta(ge=0, le=MAX_TIME)]


class ReservedRank(Record, frozen=True):
    """A rank of a run: its PID, and the UUID of its CUDA device."""

    run: Text
    rank: Annotated[int, Meta(ge=0, le=MAX_RANK)]
    pid: Annotated[int, Meta(ge=0, le=MAX_PID)]
    uuid: Text


class ReservationEntry(FileRecord, QueueTerms, frozen=True, kw_only=True):
    """The file of a reservation.

    `since` is the Unix time at which the run joined the queue, `selection` its `device.gpus`. `gpus` contains the
    `CudaDevice.reservation_id` of each of its devices, and is empty while it waits. `visible` contains that of each
    device that is visible to it. `write_lock` says whether it holds the write lock on its lock file.

    `reason` is why it waits, `backfill_until` the Unix time until which runs behind it may use the devices that it
    claims. The terms have no defaults here: without `blocked`, a run that claims no devices would claim some.
    """

    priority: Priority
    blocked: Text
    share: NumSharers
    run: Text
    since: ArrivalTime
    selection: Text
    visible: Devices
    gpus: Devices
    ranks: Annotated[tuple[ReservedRank, ...], Meta(max_length=MAX_RANKS_PER_USER)]
    write_lock: bool
    backfill_until: QueuePosition = 0.0
    reason: Text = ""


class ReservationInfo(ReservationEntry, frozen=True, kw_only=True):
    """The reservation of a live run: its file, as far as other users can trust it, and what the file system says.

    `uid` is the user who owns its files, `lock_name` the name of its lock file.
    """

    uid: Annotated[int, Meta(ge=0, lt=1 << 32)]
    lock_name: str
    position: QueuePosition

    @property
    def user(self) -> str:
        return name_of_user(self.uid)

    @property
    def is_waiting(self) -> bool:
        return not self.gpus

    @property
    def is_ready(self) -> bool:
        """Whether it waits for GPUs only."""
        return self.is_waiting and not self.blocked

    @property
    def key(self) -> tuple[int, str]:
        """Unique key of the reservation, which no other user can imitate."""
        return self.uid, self.lock_name


def reservations_root() -> Path:
    """Return the folder in which all users of the host reserve GPUs: $GPUTRAIN_RESERVATIONS, else that of the settings,
    else /tmp."""
    if folder := os.environ.get("GPUTRAIN_RESERVATIONS"):
        return Path(folder)
    return _root_of_settings(settings_file()) or Path("/tmp")  # noqa: S108 (known to all users of the host)


@cache
def _root_of_settings(path: Path) -> Path | None:
    """Return the folder that the settings file of the user names, None without one. No run starts if it is invalid."""
    if path.exists():
        # Takes 0.2 s to import.
        from engine.config.settings import read_settings

        with suppress(UsageError):
            return read_settings().reservations
    return None


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
    return bool(_FLOCK.unpack_from(answer)[0] != fcntl.F_UNLCK)


def remove_entry(folder: Path, lock_name: str) -> None:
    """Remove the files of a reservation of this user, and the folder if it was the last one."""
    for name in (_json_name(lock_name), lock_name):
        with suppress(OSError):
            (folder / name).unlink()
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
    for problem in reader.ignored_problems():
        report(problem)
    return sorted(reader.reservations, key=lambda reservation: (reservation.since, reservation.key))


class _Reader:
    """One pass over all folders."""

    def __init__(self, root: Path, remove_stale: bool) -> None:
        self.reservations: list[ReservationInfo] = []
        self._root, self._remove_stale = root, remove_stale
        # By user.
        self._num_folders: dict[int, int] = {}
        self._num_ranks: dict[int, int] = {}
        self._ignored: dict[int, tuple[int, str]] = {}
        """The number of their ignored entries, and why the first one is ignored."""

    def read(self) -> None:
        """Raises OSError if the root cannot be listed."""
        with opened(self._root, os.O_RDONLY | os.O_DIRECTORY) as root_fd, os.scandir(root_fd) as listing:
            for entry in listing:
                if match := FOLDER_NAME.fullmatch(entry.name):
                    self._read_folder(root_fd, entry.name, int(match[1]))

    def ignored_problems(self) -> list[Problem]:
        return [
            Problem(
                "",
                f"ignored {pluralize(count, 'invalid GPU reservation')} of {describe_user(uid)} in {self._root}: "
                f"{'' if count == 1 else 'for example, '}{reason}",
                "only that user can remove them",
                code="damaged",
            )
            for uid, (count, reason) in self._ignored.items()
        ]

    def _ignore(self, uid: int, name: str, reason: str) -> None:
        """Note that an entry of a user is ignored."""
        shown = printable(name) if len(name) <= MAX_SHOWN_CHARS else f"{printable(name[:MAX_SHOWN_CHARS])}…"
        count, first_reason = self._ignored.get(uid, (0, f"{shown} {reason}"))
        self._ignored[uid] = count + 1, first_reason

    def _read_folder(self, root_fd: int, name: str, uid: int) -> None:
        owner = uid
        try:
            # A link, or a named pipe, is not opened at all.
            status = os.stat(name, dir_fd=root_fd, follow_symlinks=False)
            owner = status.st_uid
            if (reason := self._why_not_folder_of(uid, status)) is not None:
                return self._ignore(owner, name, reason)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._ignore(owner, name, f"cannot be opened ({error.strerror})")
        try:
            # Between the two calls, its owner may have replaced it.
            if os.fstat(folder).st_uid == uid:
                self._read_entries(folder, name, uid)
        except OSError as error:
            self._ignore(uid, name, f"cannot be listed ({error.strerror})")
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
            self._ignore(uid, name, f"has more than {MAX_FILES_PER_FOLDER} files")
        for lock_name in names[:MAX_FILES_PER_FOLDER]:
            if not lock_name.endswith(".lock"):
                continue
            try:
                reservation = self._read_entry(folder, lock_name, uid, self._root / name)
            except FileNotFoundError:
                # Released in the meantime.
                continue
            except OSError as error:
                if not isinstance(error, PermissionError) or not _is_recent(folder, lock_name):
                    self._ignore(uid, f"{name}/{lock_name}", f"cannot be used ({error.strerror})")
            except ValueError as error:
                self._ignore(uid, f"{name}/{_json_name(lock_name)}", str(error))
            else:
                self.reservations += [reservation] if reservation is not None else []

    def _read_entry(self, folder: int, lock_name: str, uid: int, path: Path) -> ReservationInfo | None:
        """Return the reservation of a lock file; None if no process holds it.

        Raises OSError if its files cannot be read, and ValueError if they are invalid.
        """
        with open_regular_file(lock_name, dir_fd=folder) as lock:
            status = os.fstat(lock.fileno())
            if status.st_uid != uid:
                raise OSError(errno.EINVAL, f"belongs to {describe_user(status.st_uid)}")
            is_live = has_flock(lock.fileno())
            entry = _read_file(folder, _json_name(lock_name), uid) if is_live else None
            # Another user may hold the flock of a dead run.
            if entry is not None and (not entry.write_lock or has_write_lock(lock.fileno())):
                return self._info(entry, uid, lock_name, status.st_ctime)
        is_published = status.st_mode & stat.S_IROTH or time.time() - status.st_ctime > UNPUBLISHED_SECONDS
        if self._remove_stale and uid == os.getuid() and is_published:
            remove_entry(path, lock_name)
        return None

    def _info(self, entry: ReservationEntry, uid: int, lock_name: str, created_at: float) -> ReservationInfo:
        """Raises ValueError if the user has too many ranks."""
        self._num_ranks[uid] = self._num_ranks.get(uid, 0) + len(entry.ranks)
        if self._num_ranks[uid] > MAX_RANKS_PER_USER:
            raise ValueError(f"exceeds {MAX_RANKS_PER_USER} ranks")
        # All names that gputrain gives to runs are unchanged by this.
        run = re.sub(r"[^\w.+-]", "_", entry.run)[:MAX_SHOWN_CHARS]
        trusted = {
            "run": run,
            "uid": uid,
            "lock_name": lock_name,
            "since": max(entry.since, created_at),
            "ranks": tuple(replace(rank, run=run) for rank in entry.ranks if _may_be_process_of(rank.pid, uid)),
            "position": entry.since if isinstance(entry.position, UnsetType) else entry.position,
        }
        return ReservationInfo(**(asdict(entry) | trusted))


def _json_name(lock_name: str) -> str:
    return f"{lock_name.removesuffix('.lock')}.json"


def _is_recent(folder: int, lock_name: str) -> bool:
    """Whether a lock file may not be published yet, or was removed in the meantime."""
    try:
        return time.time() - os.stat(lock_name, dir_fd=folder).st_ctime < UNPUBLISHED_SECONDS
    except OSError:
        return True


def _read_file(folder: int, name: str, uid: int) -> ReservationEntry:
    """Return the entry in a file of a user. Raises OSError and ValueError."""
    try:
        with open_regular_file(name, MAX_ENTRY_BYTES, dir_fd=folder) as file:
            if os.fstat(file.fileno()).st_uid != uid:
                raise ValueError("belongs to another user")
            return decode(file.read(MAX_ENTRY_BYTES), ReservationEntry)
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
