"""Follow all runs below some paths as a list does: which there are, what they do, and their latest values.

A poll is bounded in time: it finds new runs, looks which files have grown, and reads those of the runs that are wanted
first, then of others. `engine.runs.foreign_record` makes rows of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.base.units import format_bytes
from engine.watch.activity import Activity, judge
from engine.watch.figures import Figures, LogFigures
from engine.watch.folders import MAX_UNREAD, ForeignRun, FoundRuns, RunFollower
from engine.watch.parameters import Parameters, merge_parameters

# A search of 2,000 runs in known folders takes 50 ms.
SEARCH_SECONDS, SEARCH_SHARE = 2.0, 0.03
# For looking which files have changed: 2,000 take 20 ms, more where a file server answers.
CHECK_SECONDS, CHECK_INTERVAL_SECONDS = 0.05, 0.5
ROW_POLL_BYTES = 1 << 18
# The list does not read larger logs: the last values are at their end, and the screen of the run reads them.
MAX_ROW_BYTES = 1 << 26


@dataclass(frozen=True)
class ListedRun:
    """A run as a list shows it. `is_read` tells that `metrics` and `parameters` are complete, `note` why they never
    are."""

    run: ForeignRun
    activity: Activity
    changed_at: float
    metrics: Mapping[str, Figures] = field(default_factory=dict)
    parameters: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)
    is_read: bool = False
    note: str = ""

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return self.run.key


class ForeignRunList:
    """The runs that `search` finds, the one that changed last first. Not safe for threads.

    `runs` is the same list as before if nothing has changed. `complete` tells that all have been found and read. `own`
    are the folders of runs of gputrain that the last search met, and `unread` what it says of files that look like
    metrics.
    """

    def __init__(self, search: Callable[[], Iterator[FoundRuns]]) -> None:
        self._search = search
        self._followed: dict[str, FollowedRun] = {}
        self._found: set[str] = set()
        self._is_limited = False
        self._searching: Iterator[FoundRuns] | None = None
        self._search_seconds = self._next_search = 0.0
        self._position, self._next_check = 0, 0.0
        self.runs: list[ListedRun] = []
        self.own: frozenset[Path] = frozenset()
        self.unread: tuple[str, ...] = ()
        self.complete = self.has_searched = self.is_partial = False
        """`has_searched`: the first search is over. `is_partial`: the search met one of its limits."""

    @property
    def num_read(self) -> int:
        """Number of runs whose values are known."""
        return sum(run.listed.is_read for run in self._followed.values())

    def poll(self, max_seconds: float, first: Collection[str] = ()) -> None:
        """Find runs, changes and values for about `max_seconds`, beginning with the runs whose keys are `first`."""
        deadline = time.monotonic() + max_seconds
        self._find(deadline)
        if time.monotonic() >= self._next_check:
            self._check(first)
            # A list that is being read is polled without a pause.
            self._next_check = time.monotonic() + CHECK_INTERVAL_SECONDS
        self._read(first, deadline)
        runs = sorted((run.listed for run in self._followed.values()), key=lambda run: (-run.changed_at, run.run.name))
        if len(runs) != len(self.runs) or any(new is not old for new, old in zip(runs, self.runs, strict=True)):
            self.runs = runs
        self.complete = self.has_searched and all(run.is_settled for run in self._followed.values())

    def _find(self, deadline: float) -> None:
        """Begin a search, or continue the one that the last poll had no time for."""
        if self._searching is None and time.monotonic() >= self._next_search:
            self._searching, self._search_seconds, self._found = self._search(), 0.0, set()
            self._is_limited, self._own_now, self._unread_now = False, set[Path](), list[str]()
        if self._searching is None:
            return
        began = time.monotonic()
        for part in self._searching:
            self._is_limited |= part.is_partial
            self._own_now |= part.own
            self._unread_now += part.unread
            for run in part.runs:
                self._add(run)
            if time.monotonic() > deadline:
                self._search_seconds += time.monotonic() - began
                return
        self._search_seconds += time.monotonic() - began
        self._searching, self.has_searched, self.is_partial = None, True, self._is_limited
        self.own, self.unread = frozenset(self._own_now), tuple(self._unread_now[:MAX_UNREAD])
        self._next_search = time.monotonic() + max(SEARCH_SECONDS, self._search_seconds / SEARCH_SHARE)
        for key in self._followed.keys() - self._found:
            del self._followed[key]

    def _add(self, run: ForeignRun) -> None:
        key = run.key
        self._found.add(key)
        known = self._followed.get(key)
        if known is None:
            self._followed[key] = FollowedRun(run)
        else:
            known.update(run)

    def _check(self, first: Collection[str]) -> None:
        """Find the runs that have changed. Each poll checks the wanted and growing ones, and some others."""
        now = time.time()
        wanted = [self._followed[key] for key in first if key in self._followed]
        names = set(first)
        growing = [run for key, run in self._followed.items() if run.is_growing and key not in names]
        others = [run for key, run in self._followed.items() if not run.is_growing and key not in names]
        start = self._position % max(len(others), 1)
        others = others[start:] + others[:start]
        deadline = time.monotonic() + CHECK_SECONDS
        order = [*wanted, *growing, *others]
        for index, run in enumerate(order):
            run.check(now)
            if time.monotonic() > deadline:
                self._position = start + max(index + 1 - len(wanted) - len(growing), 0)
                break

    def _read(self, first: Collection[str], deadline: float) -> None:
        """Read a part of each run that has unread bytes, the wanted ones first, again and again until `deadline`."""
        wanted = [self._followed[key] for key in first if key in self._followed]
        names = set(first)
        others = [run for key, run in self._followed.items() if run.has_unread and key not in names]
        pending = [run for run in (*wanted, *others) if run.has_unread]
        while pending:
            for run in pending:
                run.read()
                if time.monotonic() > deadline:
                    return
            pending = [run for run in pending if run.has_unread]


class FollowedRun:
    """One run of the list, and what has been read of it."""

    def __init__(self, run: ForeignRun) -> None:
        self.paths = tuple(path for log in run.logs for path in log.files)
        self._stamp: tuple[int, int] = (0, 0)
        self._begin(run)

    def _begin(self, run: ForeignRun) -> None:
        self._has_ended = run.has_ended
        self._follower: RunFollower | None = None
        self._metrics = [LogFigures() for _ in run.logs]
        self._parameters: Parameters = {}
        self._read_bytes = [0 for _ in run.logs]
        self.has_unread = True
        self.listed = ListedRun(run, Activity.QUIET, 0.0)
        self.check(time.time())

    def update(self, run: ForeignRun) -> None:
        """Follow the logs that a search has found, from the beginning if there are others than before."""
        self.paths = tuple(path for log in run.logs for path in log.files)
        if run.log_ids() != self.listed.run.log_ids():
            self._stamp = (0, 0)
            self._begin(run)

    @property
    def is_growing(self) -> bool:
        return self.listed.activity is Activity.GROWING

    @property
    def is_settled(self) -> bool:
        """Whether all that is to be known of it is known, or can never be."""
        return self.listed.is_read or bool(self.listed.note)

    def check(self, now: float) -> None:
        """Look when its files were written, and judge it."""
        stamp = self._find_stamp()
        if stamp != self._stamp:
            self._stamp, self.has_unread = stamp, True
        is_large = stamp[1] - sum(self._read_bytes) > MAX_ROW_BYTES
        self.has_unread = self.has_unread and not is_large
        run = self.listed.run
        # The file of several runs tells when any of them was written.
        changed_at = run.changed_at() if run.shares_file else stamp[0] / 1e9
        activity = judge(changed_at, now, has_ended=self._has_ended)
        note = f"{format_bytes(stamp[1])} of logs; enter reads them" if is_large else ""
        self._publish(activity=activity, changed_at=changed_at, note=note)

    def _find_stamp(self) -> tuple[int, int]:
        """Return the latest modification time of its files in ns, and their size."""
        modified, size = 0, 0
        for path in self.paths:
            try:
                status = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - a Path takes longer
            except OSError:
                continue
            modified, size = max(modified, status.st_mtime_ns), size + status.st_size
        return modified, size

    def read(self) -> None:
        """Read the next part of its logs."""
        run = self.listed.run
        if self._follower is None:
            self._follower = RunFollower(run)
            self._parameters = run.read_parameters()
        readings = self._follower.poll(ROW_POLL_BYTES)
        for log, reading in zip(self._metrics, readings, strict=True):
            log.add(reading)
            self._parameters = merge_parameters(self._parameters, reading.parameters)
        self._has_ended = any(reading.has_ended for reading in readings)
        before, self._read_bytes = self._read_bytes, [reading.read_bytes for reading in readings]
        has_moved = before != self._read_bytes or any(reading.drop_from is not None for reading in readings)
        # An incomplete last record is read when the file has grown.
        self.has_unread = has_moved and any(reading.share < 1 for reading in readings)
        metrics = {name: figures for log in self._metrics for name, figures in log.figures().items()}
        self._publish(
            metrics=metrics if metrics != self.listed.metrics else self.listed.metrics,
            parameters=self._parameters,
            is_read=self.listed.is_read or not self.has_unread,
        )

    def _publish(self, **changes: object) -> None:
        """Replace what is listed, unless nothing changes."""
        if any(getattr(self.listed, name) != value for name, value in changes.items()):
            self.listed = replace(self.listed, **changes)  # type: ignore[arg-type]  # fields of ListedRun
