"""A thread that reads several runs for `tui.screens.compare`, and follows those that train.

First it reads configs and records, then the curves of one run after the other. Runs that were read before come from a
`CompareCache`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from engine.command.metric_files import CommandMetrics
from engine.command.run_metrics import MetricsFinder
from engine.foreign.activity import Activity
from engine.foreign.folders import ForeignRun
from engine.runs.comparison import (
    ComparedRun,
    Comparison,
    compare_runs,
    describe_run,
    read_flat_config,
)
from engine.runs.curves import CurveData
from engine.runs.find import OpenedRun
from engine.runs.folder import LIVE_STATES, RunFolder, RunState
from engine.runs.journal_follower import JournalFollower
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import NO_METRICS
from engine.runs.record_completion import open_run
from engine.runs.reduced_curves import Curves, reduce_curves
from engine.show.foreign_run import ForeignData
from engine.utils.files import FileStamp, find_file_stamp
from tui.pollers.foreign_run import SLICE_PAUSE_SECONDS
from tui.pollers.runs import RUN_POLL_INTERVAL_SECONDS
from tui.pollers.watched import Poller

T = TypeVar("T")
# Of earlier comparisons.
MAX_KEPT_RUNS = 64
# A run that takes longer to read is shown in parts.
PART_SECONDS = 1.0


@dataclass(frozen=True)
class ReadRun:
    """What has been read of a run. `is_missing`: the folder is gone, and this is the last known state."""

    run: OpenedRun
    curves: Curves | None = None
    described: ComparedRun | None = None
    is_missing: bool = False
    foreign: str | None = None
    """Why other users can change the run; None if they cannot."""

    @property
    def is_live(self) -> bool:
        if self.described is None:
            return False
        return self.described.state == Activity.GROWING or self.described.state in LIVE_STATES


class CompareCache:
    """What is known of runs that were compared before, for all comparisons of this session."""

    def __init__(self) -> None:
        self._described: dict[Path, tuple[_Stamps, ComparedRun]] = {}
        self._curves: dict[Path, tuple[FileStamp, Curves]] = {}

    def described(self, folder: RunFolder) -> ComparedRun | None:
        """Return the description of a run that has ended, if its files have not changed since."""
        known = self._described.get(folder.path)
        return known[1] if known is not None and known[0] == _stamps(folder) else None

    def keep_described(self, folder: RunFolder, stamps: _Stamps, described: ComparedRun) -> None:
        """Keep the description of a run that has ended."""
        _keep(self._described, folder.path, (stamps, described))

    def curves(self, journal: Path, *, may_have_grown: bool) -> Curves | None:
        """Return the curves of a journal, if it has not changed since; with `may_have_grown`, also if it is longer."""
        known, stamp = self._curves.get(journal), find_file_stamp(journal)
        if known is None or stamp is None:
            return None
        is_grown = may_have_grown and stamp[0] == known[0][0] and stamp[1] >= known[0][1]
        return known[1] if is_grown or stamp == known[0] else None

    def keep_curves(self, journal: Path, stamp: FileStamp, curves: Curves) -> None:
        """Keep the curves of a journal with this stamp."""
        _keep(self._curves, journal, (stamp, curves))


def _keep(known: dict[Path, T], path: Path, value: T) -> None:
    """Keep a value, and drop the one that was kept first if there are too many."""
    known.pop(path, None)
    known[path] = value
    if len(known) > MAX_KEPT_RUNS:
        del known[next(iter(known))]


_Stamps = tuple[FileStamp | None, FileStamp | None, FileStamp | None]


def _stamps(folder: RunFolder) -> _Stamps:
    # The owner replaces its record and `owner.json` while the run is live, and when it ends.
    return find_file_stamp(folder.summary), find_file_stamp(folder.config), find_file_stamp(folder.owner)


class _RunFollower:
    """Reads one run: all of its journal at first, then the new lines. Steps of a run that has ended are not kept."""

    def __init__(self, folder: RunFolder, cache: CompareCache) -> None:
        self._folder, self._cache = folder, cache
        curves = cache.curves(folder.journal, may_have_grown=True)
        self.state = ReadRun(folder, curves, cache.described(folder), foreign=folder.owner_problem())
        self._forget()
        self._described_stamps: _Stamps | None = None
        self._read_stamp: FileStamp | None = None
        self._stored: tuple[FileStamp | None, tuple[dict[str, Any] | None, str | None]] | None = None
        self.has_more = False

    def describe(self) -> bool:
        """Read config and record if they may have changed; return whether they have."""
        before, stamps = self.state, _stamps(self._folder)
        if not self._folder.path.is_dir():
            self.state = replace(before, is_missing=True)
        elif stamps != self._described_stamps or before.is_missing or before.is_live or before.described is None:
            described = self._cache.described(self._folder) or self._read_description(stamps)
            self.state = replace(before, described=described, is_missing=False)
            self._described_stamps = stamps
        if self.state.described is None:
            self.state = replace(self.state, described=self._read_description(stamps))
        return self.state != before

    def _read_description(self, stamps: _Stamps) -> ComparedRun:
        config = stamps[1]
        if self._stored is None or self._stored[0] != config:
            self._stored = (config, read_flat_config(self._folder.config))
        described = describe_run(self._folder, open_run(self._folder).record, self._stored[1])
        if not RunState(described.state).live:
            self._cache.keep_described(self._folder, stamps, described)
        return described

    def read_curves(self, stopped: Callable[[], bool]) -> bool:
        """Read the steps that are new; return whether there are any."""
        before, journal = self.state, self._folder.journal
        stamp = find_file_stamp(journal)
        if stamp is None or stamp == self._read_stamp:
            return False
        known = None if self._read_stamp else self._cache.curves(journal, may_have_grown=False)
        if known is not None:
            self.state, self._read_stamp = replace(before, curves=known), stamp
            return known is not before.curves
        was_replaced = self._journal.look()
        if was_replaced:
            self._data.reset()
        for events in self._journal.chunks(stopped):
            self._data.add_events(events)
        is_unreadable = self._journal.offset == 0 and not was_replaced
        if stopped() or (is_unreadable and before.curves is not None):
            return False
        reduced = reduce_curves(self._data)
        self._cache.keep_curves(journal, stamp, reduced)
        self.state, self._read_stamp = replace(before, curves=reduced), stamp
        if not before.is_live:
            self._forget()
        return True

    def _forget(self) -> None:
        self._data, self._journal = CurveData(), JournalFollower(self._folder.journal)


class _ForeignFollower:
    """Reads one foreign run, or the metrics of a command: all of its logs at first, then what is new, and of a command
    the logs that it begins later. Its curves keep bounded memory."""

    def __init__(self, run: ForeignRun) -> None:
        self._finder = MetricsFinder(RunFolder(run.folder)) if isinstance(run, CommandMetrics) else None
        self._data = ForeignData(run)
        self.state = ReadRun(run)

    @property
    def has_more(self) -> bool:
        """Whether what was read is only the beginning."""
        return self._data.has_more

    def describe(self) -> bool:
        """Describe the run as far as it has been read; return whether that has changed."""
        if self._finder is not None and (found := self._finder.find()).log_ids() != self._data.run.log_ids():
            self._data = ForeignData(found)
        before, data = self.state, self._data
        if not data.run.changed_at() and before.described is not None:
            self.state = replace(before, is_missing=True)
        elif before.described is None or before.is_missing or before.described.state != data.state():
            self.state = replace(before, described=data.describe(), is_missing=False)
        return self.state != before

    def read_curves(self, stopped: Callable[[], bool]) -> bool:
        """Read what is new; return whether there is anything."""
        end = time.monotonic() + PART_SECONDS
        has_news = self._data.read(lambda: stopped() or time.monotonic() > end)
        if has_news or self.state.curves is None:
            curves = self._data.curves()
            if not self._data.has_more:
                # For the choice of the x axis, which is made in the event loop.
                _ = curves.has_whole_epochs_only
            self.state = replace(self.state, curves=curves, described=self._data.describe())
            return True
        return False


class ComparePoller(Poller):
    """Publishes `runs`, in the order of the folders, and their `comparison`.

    No `Watched`: it publishes each run when it has been read.
    Both have a value from the start where all is known of earlier comparisons.
    """

    def __init__(self, runs: Sequence[OpenedRun], cache: CompareCache) -> None:
        super().__init__("compare", RUN_POLL_INTERVAL_SECONDS)
        roots = [run.path.parent for run in runs if isinstance(run, RunFolder)]
        self._directions = read_directions(roots[0]) if roots else NO_METRICS
        self._followers = [
            _RunFollower(run, cache) if isinstance(run, RunFolder) else _ForeignFollower(run) for run in runs
        ]
        self.runs: tuple[ReadRun, ...] = ()
        self.comparison: Comparison | None = None
        self.version = 0
        """Increases with every change of `runs` and `comparison`."""
        self.caught_up = False
        """Whether all runs have been read."""
        self._publish(all(follower.state.described is not None for follower in self._followers))

    def poll(self) -> None:
        changed = [follower.describe() for follower in self._followers]
        if any(changed) or self.comparison is None:
            self._publish(True)
        # The pause leaves the interpreter to the thread that draws.
        stopped = partial(self._stop_event.wait, SLICE_PAUSE_SECONDS)
        for follower in self._followers:
            has_more = True
            while has_more:
                described = follower.state.described
                if follower.read_curves(stopped):
                    self._publish(follower.state.described is not described)
                if self._stop_event.is_set():
                    return
                has_more = follower.has_more
        self.caught_up = True

    def _publish(self, described: bool) -> None:
        self.runs = tuple(follower.state for follower in self._followers)
        if described:
            runs = [run.described for run in self.runs if run.described is not None]
            self.comparison = compare_runs(runs, self._directions)
        self.version += 1
