"""A thread that reads several runs for `tui.screens.compare`, and follows those that train.

First it reads configs and records, then the curves of one run after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from engine.runs.folder import LIVE_STATES, RunFolder
from engine.runs.journal_follower import JournalFollower
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import NO_METRICS
from engine.runs.record_completion import open_run
from engine.runs.reduced_curves import reduce_curves
from engine.show.foreign_curves import CurveReader
from engine.show.foreign_run import Curves, KeyedCurves, describe, find_state
from engine.utils.files import FileStamp, find_file_stamp
from tui.pollers.foreign_run import SLICE_PAUSE_SECONDS
from tui.pollers.runs import RUN_POLL_INTERVAL_SECONDS
from tui.pollers.watched import Poller

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


_Stamps = tuple[FileStamp | None, FileStamp | None, FileStamp | None]


def _stamps(folder: RunFolder) -> _Stamps:
    # The owner replaces its record and `owner.json` while the run is live, and when it ends.
    return find_file_stamp(folder.summary), find_file_stamp(folder.config), find_file_stamp(folder.owner)


class _RunFollower:
    """Reads one run: all of its journal at first, then the new lines. Steps of a run that has ended are not kept."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.state = ReadRun(folder, foreign=folder.owner_problem())
        self._forget()
        self._described_stamps: _Stamps | None = None
        self._read_stamp: FileStamp | None = None
        self._stored: tuple[FileStamp | None, tuple[dict[str, Any] | None, str | None]] | None = None
        self.has_more = False

    def describe(self) -> bool:
        """Read config and record if they may have changed; return whether they have."""
        before, stamps = self.state, _stamps(self._folder)
        is_missing = not self._folder.path.is_dir()
        is_known = stamps == self._described_stamps and not before.is_missing and not before.is_live
        if before.described is None or not (is_missing or is_known):
            self.state, self._described_stamps = replace(before, described=self._read_description(stamps)), stamps
        self.state = replace(self.state, is_missing=is_missing)
        return self.state != before

    def _read_description(self, stamps: _Stamps) -> ComparedRun:
        config = stamps[1]
        if self._stored is None or self._stored[0] != config:
            self._stored = (config, read_flat_config(self._folder.config))
        return describe_run(self._folder, open_run(self._folder).record, self._stored[1])

    def read_curves(self, stopped: Callable[[], bool]) -> bool:
        """Read the steps that are new; return whether there are any."""
        before, stamp = self.state, find_file_stamp(self._folder.journal)
        if stamp is None or stamp == self._read_stamp:
            return False
        was_replaced = self._journal.look()
        if was_replaced:
            self._data.reset()
        for events in self._journal.chunks(stopped):
            self._data.add_events(events)
        is_unreadable = self._journal.offset == 0 and not was_replaced
        if stopped() or (is_unreadable and before.curves is not None):
            return False
        self.state, self._read_stamp = replace(before, curves=reduce_curves(self._data)), stamp
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
        self._data = CurveReader(run)
        self.state = ReadRun(run)

    @property
    def has_more(self) -> bool:
        """Whether what was read is only the beginning."""
        return self._data.has_more

    def describe(self) -> bool:
        """Describe the run as far as it has been read; return whether that has changed."""
        if self._finder is not None and (found := self._finder.find()).log_ids() != self._data.run.log_ids():
            self._data = CurveReader(found)
        before, data = self.state, self._data
        if not data.run.changed_at() and before.described is not None:
            self.state = replace(before, is_missing=True)
        elif before.described is None or before.is_missing or before.described.state != find_state(data):
            self.state = replace(before, described=describe(data), is_missing=False)
        return self.state != before

    def read_curves(self, stopped: Callable[[], bool]) -> bool:
        """Read what is new; return whether there is anything."""
        end = time.monotonic() + PART_SECONDS
        has_news = self._data.read(lambda: stopped() or time.monotonic() > end)
        if has_news or self.state.curves is None:
            curves = KeyedCurves(self._data.curves)
            if not self._data.has_more:
                # For the choice of the x axis, which is made in the event loop.
                _ = curves.has_whole_epochs_only
            self.state = replace(self.state, curves=curves, described=describe(self._data))
            return True
        return False


class ComparePoller(Poller):
    """Publishes `runs`, in the order of the folders, and their `comparison`.

    No `Watched`: it publishes each run when it has been read.
    """

    def __init__(self, runs: Sequence[OpenedRun]) -> None:
        super().__init__("compare", RUN_POLL_INTERVAL_SECONDS)
        roots = [run.path.parent for run in runs if isinstance(run, RunFolder)]
        self._directions = read_directions(roots[0]) if roots else NO_METRICS
        self._followers = [_RunFollower(run) if isinstance(run, RunFolder) else _ForeignFollower(run) for run in runs]
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
