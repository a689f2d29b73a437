"""The rows of all runs in a folder, read from their records: `gputrain runs` and the run list of the screen follow it.

A row is valid as long as its folder is unchanged, because whatever gputrain writes for a list is renamed into the
folder, which changes its modification time. Live runs are read again with each poll.
"""

from __future__ import annotations

import math
import operator
import os
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import file_errors
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, RunFolder
from engine.runs.root import is_listed
from engine.runs.run_row import RunRow, read_row

# A folder that was changed less than this before it was read may change again without another modification time.
# FAT has a resolution of 2 s.
FRESH_SECONDS = 2.0
# Folders of ended runs that a poll compares with their stamps: the newest runs, and the next part of the others. 10,000
# would take 30 ms of CPU each second. A file server takes longer, so there is a limit in seconds too.
CHECK_NEWEST, CHECK_OTHERS, CHECK_SECONDS = 200, 400, 0.02
# A local run takes 0.06 ms. A file server takes milliseconds for each file, and answers many requests at once, so
# threads read the other runs after this many slow ones in a row. For local runs, the interpreter lock would slow them.
SLOW_READ_SECONDS, SLOW_READS, THREADS = 0.002, 4, 64


@dataclass(slots=True)
class _Entry:
    """What was read of a folder: its row, None if it is no run, and its stamp from before. `is_fresh`: it may have
    changed since without another stamp."""

    stamp: tuple[int, ...] | None
    row: RunRow | None
    is_fresh: bool

    @property
    def is_live(self) -> bool:
        return self.row is not None and (self.row.live or self.row.has_open_job)

    def is_valid(self, stamp: tuple[int, ...] | None) -> bool:
        """Whether the row is still that of the folder. What makes a file readable does not change its folder."""
        is_final = self.row is None or not (self.is_live or self.row.unreadable)
        return self.stamp == stamp and is_final and not self.is_fresh


class RunList:
    """Rows of the runs in `root`. Each `poll` reads what has changed, then other runs for a limited time.

    `rows` are those read so far, latest start first, and `complete` says whether that is all. The same list object
    means that no row has changed. Not safe for threads.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rows: list[RunRow] = []
        self.complete = False
        self._entries: dict[str, _Entry] = {}
        self._waiting: list[str] = []
        """Names of the folders that were never read, the next one first."""
        self._has_changed = False
        """Whether an entry has changed since `rows` was made."""
        self._live: set[str] = set()
        self._slow_reads = 0
        self._check_position = 0
        self._root_stamp: int | None = None

    @property
    def count(self) -> int:
        """Number of runs in the folder, and of the folders not read yet."""
        return len(self.rows) + len(self._waiting)

    @property
    def live_rows(self) -> list[RunRow]:
        """The rows of live runs, latest start first."""
        return sorted((row for name in self._live if (row := self._entries[name].row) is not None), key=_order)

    def poll(self, max_seconds: float | None = None, *, check_all: bool = False) -> None:
        """Find new and changed runs, and read those that were never read for about `max_seconds`; None reads all.

        Of thousands of ended runs, a poll finds the changes of the newest ones and of the next part of the others;
        with `check_all` those of all. Raises UsageError if the folder cannot be read.
        """
        self._list()
        self._read_all(list(self._live))
        if self.complete:
            self._check(check_all=check_all)
        done = self._read_all(self._waiting, math.inf if max_seconds is None else max_seconds)
        self._waiting = self._waiting[done:]
        if self._has_changed:
            self.rows = sorted((entry.row for entry in self._entries.values() if entry.row is not None), key=_order)
        self._has_changed = False
        self.complete = not self._waiting

    def _list(self) -> None:
        """Find new and deleted folders."""
        modified, found = 0, dict[str, int]()
        with (
            file_errors("runs folder", f"{self.root} cannot be read", OTHER_RUNS_FOLDER_ADVICE),
            suppress(FileNotFoundError, NotADirectoryError),
        ):
            modified = self.root.stat().st_mtime_ns
            if modified == self._root_stamp and not _is_fresh(modified):
                return
            with os.scandir(self.root) as entries:
                found = {entry.name: entry.inode() for entry in entries if is_listed(entry.name) and _is_folder(entry)}
        self._root_stamp = modified
        for name in self._entries.keys() - found.keys():
            self._has_changed |= self._entries.pop(name).row is not None
            self._live.discard(name)
        # File systems number new folders upwards, more or less, so this reads the newest runs first.
        new = found.keys() - self._entries.keys()
        self._waiting = sorted(new, key=lambda name: (found[name], name), reverse=True)

    def _check(self, *, check_all: bool) -> None:
        """Reread changed folders of ended runs."""
        if check_all:
            self._read_all(list(self._entries))
            return
        newest = {row.folder.rpartition("/")[2]: None for row in self.rows[:CHECK_NEWEST] if not row.live}
        names = [name for name in self._entries if name not in self._live and name not in newest]
        start = self._check_position % max(len(names), 1)
        done = self._read_all([*newest, *(names[start:] + names[:start])[:CHECK_OTHERS]], CHECK_SECONDS)
        self._check_position = start + max(done - len(newest), 0)

    def _read_all(self, names: Sequence[str], max_seconds: float = math.inf) -> int:
        """Bring the entries of folders up to date, in this order, for about that time. Return how many."""
        remaining, deadline = iter(names), time.monotonic() + max_seconds

        def read_remaining() -> None:
            for name in remaining:
                self._read(name)
                if time.monotonic() >= deadline:
                    break

        for name in remaining if self._slow_reads < SLOW_READS else ():
            start = time.monotonic()
            self._read(name)
            end = time.monotonic()
            self._slow_reads = self._slow_reads + 1 if end - start > SLOW_READ_SECONDS else 0
            if end >= deadline or self._slow_reads == SLOW_READS:
                break
        if self._slow_reads == SLOW_READS and time.monotonic() < deadline:
            count = min(THREADS, operator.length_hint(remaining))
            # Not an executor, which waits at the end of the program for a thread that a file server blocks.
            threads = [threading.Thread(target=read_remaining, daemon=True) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return len(names) - operator.length_hint(remaining)

    def _read(self, name: str) -> None:
        """Bring the entry of a folder up to date."""
        status, previous = _folder_status(f"{self.root}/{name}"), self._entries.get(name)
        stamp = None if status is None else (status.st_mtime_ns, *status[:6])
        if previous is not None and previous.is_valid(stamp):
            return
        row = None if status is None else read_row(RunFolder(self.root / name), status)
        known = None if previous is None else previous.row
        if row == known:
            # The same row object tells that nothing has changed.
            row = known
        else:
            self._has_changed = True
        is_fresh = stamp is not None and _is_fresh(stamp[0]) and not (row is not None and row.live)
        self._entries[name] = entry = _Entry(stamp, row, is_fresh)
        (self._live.add if entry.is_live else self._live.discard)(name)


def _order(row: RunRow) -> tuple[float, str]:
    """Return what the rows are sorted by."""
    return -(row.record.started_at or 0.0), row.name


def _folder_status(path: str) -> os.stat_result | None:
    """Return the status of a folder; None if it is none, or a link, which could lead anywhere."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status if stat.S_ISDIR(status.st_mode) else None


def _is_fresh(modified_ns: int) -> bool:
    """Whether a folder was changed just now. A time in the future is of a host whose clock was ahead."""
    return abs(time.time() - modified_ns / 1e9) <= FRESH_SECONDS


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder and no link."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
