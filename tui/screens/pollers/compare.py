"""A thread that reads several runs for `tui.screens.compare`, and follows those that train.

First it reads records, then the curves of one run after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.base.files import FileStamp, find_file_stamp
from engine.jobs.command.metric_files import CommandMetrics
from engine.jobs.command.run_metrics import MetricsFinder
from engine.report.foreign_run import describe, find_state
from engine.runs.comparison import Comparison, compare_runs
from engine.runs.curves import MAX_METRIC_COLUMNS, MIN_METRIC_COLUMNS, CurveReader, Curves
from engine.runs.find import OpenedRun
from engine.runs.folder import LIVE_STATES, RunFolder
from engine.runs.journal_source import journal_run
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import NO_METRICS
from engine.runs.run_row import RunRow, open_run
from engine.watch.activity import Activity
from tui.screens.pollers.run import SLICE_PAUSE_SECONDS
from tui.screens.pollers.watched import Poller

# A run that takes longer to read is shown in parts.
POLL_INTERVAL_SECONDS = 0.5
PART_SECONDS = 1.0
# More runs than these have fewer blocks per curve.
MANY_RUNS = 16


@dataclass(frozen=True)
class ReadRun:
    """What has been read of a run. `is_missing`: the folder is gone, and this is the last known state."""

    run: OpenedRun
    curves: Curves | None = None
    described: RunRow | None = None
    is_missing: bool = False
    foreign: str | None = None
    """Why other users can change the run; None if they cannot."""

    @property
    def is_live(self) -> bool:
        if self.described is None:
            return False
        return self.described.state == Activity.GROWING or self.described.state in LIVE_STATES


_Stamps = tuple[FileStamp | None, FileStamp | None]


def _stamps(folder: RunFolder) -> _Stamps:
    # The owner replaces its record and `owner.json` while the run is live, and when it ends.
    return find_file_stamp(folder.summary), find_file_stamp(folder.owner)


class _Follower:
    """Reads one run: all of its logs at first, then what is new, and of a command the logs that it begins later."""

    def __init__(self, run: OpenedRun, max_columns: int) -> None:
        self._max_columns = max_columns
        self._finder = MetricsFinder(RunFolder(run.folder)) if isinstance(run, CommandMetrics) else None
        self._folder = run if isinstance(run, RunFolder) else None
        self._reader = CurveReader(journal_run(run) if isinstance(run, RunFolder) else run, max_columns)
        self.state = ReadRun(run, foreign=None if self._folder is None else self._folder.owner_problem())
        self._described_stamps: _Stamps | None = None

    @property
    def has_more(self) -> bool:
        """Whether what was read is only the beginning."""
        return self._reader.has_more

    def describe(self) -> bool:
        """Describe the run if it may have changed; return whether that has changed."""
        before = self.state
        self.state = self._describe(before) if self._folder is None else self._describe_own(before, self._folder)
        return self.state != before

    def _describe_own(self, before: ReadRun, folder: RunFolder) -> ReadRun:
        """Read the record if it may have changed."""
        stamps, is_missing = _stamps(folder), not folder.path.is_dir()
        is_known = stamps == self._described_stamps and not before.is_missing and not before.is_live
        described = before.described
        if described is None or not (is_missing or is_known):
            self._described_stamps, described = stamps, open_run(folder)
        return replace(before, described=described, is_missing=is_missing)

    def _describe(self, before: ReadRun) -> ReadRun:
        """Describe a foreign run as far as it has been read."""
        if self._finder is not None and (found := self._finder.find()).log_ids() != self._reader.run.log_ids():
            self._reader = CurveReader(found, self._max_columns)
        reader = self._reader
        if not reader.run.changed_at() and before.described is not None:
            return replace(before, is_missing=True)
        if before.described is None or before.is_missing or before.described.state != find_state(reader):
            return replace(before, described=describe(reader), is_missing=False)
        return before

    def read_curves(self, stopped: Callable[[], bool]) -> bool:
        """Read what is new; return whether there is anything."""
        end = time.monotonic() + PART_SECONDS
        has_news = self._reader.read(lambda: stopped() or time.monotonic() > end)
        if not has_news and self.state.curves is not None:
            return False
        self.state = replace(self.state, curves=self._reader.curves)
        if self._folder is None:
            self.state = replace(self.state, described=describe(self._reader))
        if not self.has_more:
            # For the choice of the x axis, which is made in the event loop.
            _ = self._reader.curves.repeats_epochs
        return True


class ComparePoller(Poller):
    """Publishes `runs`, in the order of the folders, and their `comparison`.

    No `Watched`: it publishes each run when it has been read.
    """

    def __init__(self, runs: Sequence[OpenedRun]) -> None:
        super().__init__("compare", POLL_INTERVAL_SECONDS)
        roots = [run.path.parent for run in runs if isinstance(run, RunFolder)]
        self._directions = read_directions(roots[0]) if roots else NO_METRICS
        # Twice as many runs have half of the blocks each, so the memory does not grow with the runs.
        columns = max(MAX_METRIC_COLUMNS * MANY_RUNS // max(len(runs), MANY_RUNS), MIN_METRIC_COLUMNS)
        self._followers = [_Follower(run, columns) for run in runs]
        self.runs: tuple[ReadRun, ...] = ()
        self.comparison: Comparison | None = None
        self.version = 0
        """Increases with every change of `runs` and `comparison`."""
        self.caught_up = False
        """Whether all runs have been read."""
        self._publish(False)

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
