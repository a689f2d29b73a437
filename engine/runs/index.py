"""The rows of all runs in a folder, kept between programs: `gputrain runs` and the run list of the screen read it.

A row is valid as long as the files it comes from are: their size, modification time and inode are compared with those
at the time it was read. `engine.runs.index_file` stores the rows of ended runs in the user's cache. Live runs are
always read afresh. The screen shows a stored row as soon as the folder of the run is the one of its stamp: all writes
of gputrain rename a file into the folder, which changes its modification time. The files are compared later.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, RunFolder, is_listed
from engine.runs.index_file import IndexFile, Stamp, StoredRow
from engine.runs.run_row import RunRow, make_run_row
from engine.utils.errors import UsageError
from engine.utils.trust import foreign_reason

if TYPE_CHECKING:
    from engine.runs.watcher import RunWatcher

# Of a longer journal of an ended run, only the end is read; the rest is in its summary. 1 MB takes 0.3 s to parse.
MAX_FULL_READ_BYTES, TAIL_BYTES = 1 << 16, 1 << 14
# Ended runs that a poll compares with their files; 1,000 take 20 ms.
CHECKED_PER_POLL = 1000
# A file that was written less than this before it was read may change again without another modification time.
# FAT has a resolution of 2 s.
FRESH_SECONDS = 2.0
# A folder becomes a run shortly after it was created.
NEW_RUN_SECONDS = 5.0
SAVE_INTERVAL_SECONDS = 5.0
_STAMPED_FILES = ("events.jsonl", "summary.json", "config.yaml", "labels.json")
# Positions in a stamp: the folder itself, and the config, whose modification time is the start of the run.
_FOLDER_TIME, _FOLDER_INODE, _START = 0, 2, 9
NO_FILE = (0, 0, 0)


@dataclass(slots=True)
class _Entry:
    """A run that has been read. `stable` is False for files so new that they may change within their timestamps."""

    stamp: Stamp
    row: RunRow
    stable: bool
    watcher: RunWatcher | None = None
    """Follows the journal of a live run."""


class RunIndex:
    """Rows of the runs in `root`. Each `poll` reads what has changed, then other runs for a limited time, newest first.

    `rows` are those read so far, latest start first, and `complete` says whether that is all. The same list object
    means that no row has changed. With `check_later`, the first rows are stored ones whose folders have not changed,
    and the next polls compare their files. Not safe for threads.
    """

    def __init__(self, root: Path, *, use_cache: bool = True, check_later: bool = False) -> None:
        self.root, self._shown_root = root, str(root)
        self._check_later = check_later
        self.rows: list[RunRow] = []
        self.complete = False
        self._file = IndexFile(root) if use_cache else None
        self._stored: dict[str, StoredRow] | None = None
        self._entries: dict[str, _Entry] = {}
        self._starts: dict[str, int] = {}
        """Names of all runs, latest start first, with the modification time of their config in ns."""
        self._is_sorted = True
        self._waiting: deque[str] = deque()
        self._check_position = 0
        self._root_stamp: int | None = None
        self._unsaved: set[str] = set()
        self._last_save = time.monotonic()

    @property
    def count(self) -> int:
        """Number of runs in the folder, read or not."""
        return len(self._starts)

    def live_runs(self) -> Iterator[tuple[RunRow, RunWatcher]]:
        """Yield the live runs, with what follows their journals."""
        for name in self._starts:
            entry = self._entries.get(name)
            if entry is not None and entry.watcher is not None:
                yield entry.row, entry.watcher

    def poll(self, max_seconds: float | None = None) -> None:
        """Find new and changed runs, and read those that were never read for about `max_seconds`; None reads all.

        Raises UsageError if the folder cannot be read.
        """
        if self._stored is None:
            self._stored = self._file.load() if self._file is not None else {}
        changed = self._list()
        for name in [name for name, entry in self._entries.items() if entry.row.live]:
            changed |= self._read(name)
        if self.complete:
            changed |= self._check_ended()
        deadline = None if max_seconds is None else time.monotonic() + max_seconds
        while self._waiting:
            changed |= self._read(self._waiting.popleft())
            if deadline is not None and time.monotonic() >= deadline:
                break
        if not self._is_sorted:
            self._sort()
        if changed:
            self.rows = [entry.row for name in self._starts if (entry := self._entries.get(name)) is not None]
        self.complete = not self._waiting
        if self.complete:
            self._stored = {}
        if self._unsaved and (self.complete or len(self._unsaved) >= CHECKED_PER_POLL):
            self._save_at_times()

    def close(self) -> None:
        """Store what has been read."""
        self._save()

    def _save_at_times(self) -> None:
        if time.monotonic() - self._last_save >= SAVE_INTERVAL_SECONDS:
            self._save()

    def _save(self) -> None:
        self._last_save = time.monotonic()
        if self._file is None or not self._unsaved:
            return
        changed = {name for name in self._unsaved if name in self._entries}
        self._unsaved.clear()
        rows = {
            name: StoredRow(entry.stamp, entry.row)
            for name, entry in self._entries.items()
            if entry.stable or entry.row.live
        }
        self._file.save(rows, changed, is_complete=self.complete)

    def _list(self) -> bool:
        """Find new and deleted runs; return whether rows were removed."""
        try:
            modified = self.root.stat().st_mtime_ns
            is_new = time.time() - modified / 1e9 < NEW_RUN_SECONDS
            if modified == self._root_stamp and not is_new:
                return False
            with os.scandir(self.root) as entries:
                found = {entry.name: entry for entry in entries if is_listed(entry.name) and _is_folder(entry)}
        except (FileNotFoundError, NotADirectoryError):
            modified, found = 0, {}
        except OSError as error:
            reason = f"{self.root} cannot be read: {error.strerror}"
            raise UsageError.one("runs folder", reason, OTHER_RUNS_FOLDER_ADVICE, code="not-readable") from error
        self._root_stamp = modified
        gone = self._starts.keys() - found.keys()
        for name in gone:
            self._forget(name)
        stored, count = self._stored or {}, len(self._entries)
        new = [name for name in found.keys() - self._starts.keys() if name in stored or self._is_run(name)]
        if new:
            for name in new:
                # Those of a stored run are compared with its files when it is read.
                known = stored.get(name)
                self._starts[name] = known.stamp[_START] if known is not None else self._start_of(name)
                if known is not None and self._check_later:
                    self._accept(known, found[name])
            self._sort()
            waiting = {*self._waiting, *new} - self._entries.keys()
            # The newest runs are read first.
            self._waiting = deque(name for name in self._starts if name in waiting)
        return bool(gone) or len(self._entries) > count

    def _accept(self, known: StoredRow, found: os.DirEntry[str]) -> None:
        """Use a stored row if the folder of an ended run is still the same."""
        try:
            status = found.stat(follow_symlinks=False)
        except OSError:
            return
        is_same = known.stamp[_FOLDER_TIME] == status.st_mtime_ns and known.stamp[_FOLDER_INODE] == status.st_ino
        if is_same and not known.row.live:
            entry = self._entries[found.name] = _Entry(known.stamp, known.row, stable=True)
            self._refresh(entry, status)

    def _sort(self) -> None:
        self._starts = dict(sorted(self._starts.items(), key=lambda item: (-item[1], item[0])))
        self._is_sorted = True

    def _forget(self, name: str) -> None:
        self._entries.pop(name, None)
        del self._starts[name]
        if name in self._waiting:
            self._waiting.remove(name)

    def _check_ended(self) -> bool:
        """Compare a part of the ended runs with their files; return whether a row has changed."""
        names, changed = list(self._starts), False
        for position in range(self._check_position, self._check_position + min(CHECKED_PER_POLL, len(names))):
            name = names[position % len(names)]
            entry = self._entries.get(name)
            if entry is not None and not entry.row.live:
                changed |= self._read(name)
        self._check_position = (self._check_position + CHECKED_PER_POLL) % max(len(names), 1)
        return changed

    def _read(self, name: str) -> bool:
        """Bring the row of a run up to date; return whether it has changed."""
        entry = self._entries.get(name)
        stamp, status = self._stamp(name)
        if status is None:
            # Deleted; the next listing finds out.
            return False
        if entry is not None and not entry.row.live and entry.stamp == stamp and entry.stable:
            return self._refresh(entry, status)
        stored = self._stored.get(name) if self._stored is not None else None
        if entry is None and stored is not None and stored.stamp == stamp and not stored.row.live:
            entry = self._entries[name] = _Entry(stamp, stored.row, stable=True)
            self._refresh(entry, status)
            return True
        if not self._is_run(name):
            self._forget(name)
            return True
        previous = entry.row if entry is not None else None
        known = stored if entry is None else StoredRow(entry.stamp, entry.row)
        config = known.row.config if known is not None and _has_same_config(known, stamp) else None
        row, watcher = self._read_files(name, entry, config)
        # A time in the future is not fresh: the clock of the host that wrote the file was ahead.
        is_fresh = abs(time.time() - max(stamp[::3]) / 1e9) <= FRESH_SECONDS
        stable = not row.live and not row.unreadable and not is_fresh
        if row == previous:
            # The same object tells that nothing has changed.
            row = previous
        self._entries[name] = _Entry(stamp, row, stable, watcher)
        # The row of a live run is stored for its config only, whose schema takes 0.3 s to import.
        if stable or (row.live and config is None):
            self._unsaved.add(name)
        start = stamp[_START]
        if self._starts.get(name) != start:
            self._starts[name], self._is_sorted = start, False
        return row is not previous

    def _read_files(
        self, name: str, entry: _Entry | None, config: Mapping[str, Any] | None
    ) -> tuple[RunRow, RunWatcher | None]:
        """Read a run, except for a known config. Return its row, and what follows its journal if it is live."""
        # Imports the events of a journal, which the first frame of the screen does without.
        from engine.runs.watcher import RunWatcher

        folder = RunFolder(self.root / name)
        watcher = entry.watcher if entry is not None else None
        if watcher is None and folder.is_owned():
            watcher = RunWatcher(folder)
        reader = watcher or RunWatcher(folder, max_full_read=MAX_FULL_READ_BYTES, tail_bytes=TAIL_BYTES)
        row = make_run_row(reader, config)
        # A run that became live just now is read in full by the next poll.
        return row, watcher if row.live else None

    def _refresh(self, entry: _Entry, status: os.stat_result) -> bool:
        """Update the owner of an unchanged run; return whether the row has changed."""
        foreign = foreign_reason(status, trust_root=False)
        if foreign == entry.row.foreign:
            return False
        entry.row = entry.row._replace(foreign=foreign)
        return True

    def _stamp(self, name: str) -> tuple[Stamp, os.stat_result | None]:
        """Return modification time, size and inode of the folder and of the files that a row comes from, and the status
        of the folder."""
        try:
            handle = os.open(self._path(name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return self._stamp_by_path(name)
        try:
            folder = os.fstat(handle)
            values = [folder.st_mtime_ns, 0, folder.st_ino]
            for file in _STAMPED_FILES:
                try:
                    status = os.stat(file, dir_fd=handle, follow_symlinks=False)
                    values += (status.st_mtime_ns, status.st_size, status.st_ino)
                except OSError:
                    values += NO_FILE
            return tuple(values), folder
        finally:
            os.close(handle)

    def _stamp_by_path(self, name: str) -> tuple[Stamp, os.stat_result | None]:
        """Return the stamp of a folder that cannot be listed; no status if it is gone or a link."""
        try:
            folder = os.lstat(self._path(name))
        except OSError:
            return (), None
        if not stat.S_ISDIR(folder.st_mode):
            return (), None
        return (folder.st_mtime_ns, 0, folder.st_ino, *NO_FILE * len(_STAMPED_FILES)), folder

    def _is_run(self, name: str) -> bool:
        """Whether a folder has the lock file of a run."""
        try:
            return stat.S_ISREG(os.stat(self._path(name, "lock")).st_mode)  # noqa: PTH116 - a Path takes longer
        except (OSError, ValueError):
            return False

    def _start_of(self, name: str) -> int:
        """Return when the config of a run was written, in ns; 0 if it is missing."""
        try:
            return os.stat(self._path(name, "config.yaml"), follow_symlinks=False).st_mtime_ns  # noqa: PTH116
        except OSError:
            return 0

    def _path(self, *names: str) -> str:
        return "/".join((self._shown_root, *names))


def _has_same_config(known: StoredRow, stamp: Stamp) -> bool:
    """Whether the config that was read is that of a stamp, and cannot have changed within its timestamp."""
    part = slice(_START, _START + 3)
    is_old = abs(time.time() - stamp[part.start] / 1e9) > FRESH_SECONDS if len(stamp) >= part.stop else False
    return known.row.config_known and known.stamp[part] == stamp[part] and is_old


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder and no link: a link could lead anywhere."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
