"""The poller of one run: its curves, the end of its log, and of a run of gputrain its state.

`tui.screens.run` shows what it publishes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engine.base import codec
from engine.base.files import FileStamp, file_stamp, find_file_stamp, open_regular_file
from engine.jobs.command.run_metrics import MetricsFinder
from engine.jobs.command.spec import has_command
from engine.runs.batch.job import log_of
from engine.runs.curves import MAX_METRIC_COLUMNS, CurveReader
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.runs.journal_source import MAX_STEP_COLUMNS, JournalSource, journal_run
from engine.runs.log import log_files, pending_file, read_pending
from engine.runs.record_completion import with_stored_metrics
from engine.runs.run_record import read_run_record
from engine.runs.run_row import RunRow, make_row, open_run, read_row
from engine.watch.activity import Activity, judge
from engine.watch.folders import ForeignRun
from engine.watch.log_file import find_log_file
from tui.charts.history import LoadHistory
from tui.screens.pollers.watched import Poller, Watched
from tui.screens.tables.ranks import rank_readings

if TYPE_CHECKING:
    from engine.runs.events import EpochEvent, Event, GpuEvent, RankFailed
    from tui.screens.tables.ranks import RankReadings

# What is written appears within 2 s: a poll, and the interval at which the screen draws.
POLL_INTERVAL_SECONDS = 0.3
LOG_INTERVAL_SECONDS = 1.0
# A thread that computes takes half of the interpreter from the one that draws: slices of 25 ms, with pauses while that
# one is busy.
SLICE_BYTES = 1 << 17
SLICE_PAUSE_SECONDS, BUSY_PAUSE_SECONDS, MAX_BUSY_PAUSES = 0.001, 0.01, 20
# While a long journal is read, the state comes from the record of the run.
SHOWN_AT_ONCE_BYTES, STATE_SECONDS = 1 << 20, 0.3
# Epochs whose lines of the log are shown in columns.
MAX_LOG_EPOCHS = 60
MAX_LOG_BYTES = 1 << 16
MAX_LOG_LINES = 2000
# Longer lines fit on no screen, and are slow to draw.
MAX_LOG_LINE_LENGTH = 4096


@dataclass(frozen=True)
class RunSnapshot:
    """Latest state of a run of gputrain, its ranks and its latest epochs."""

    row: RunRow
    ranks: RankReadings
    failures: tuple[RankFailed, ...] = ()
    epochs: tuple[EpochEvent, ...] = ()
    folder_missing: bool = False
    resumable: bool = False
    """Whether it has a checkpoint."""
    evaluated: bool = False
    """Whether it has an evaluation, for the confusion matrix."""


class StateReader:
    """Makes the state of a run of gputrain from the events of its journal."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.latest: RunSnapshot | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the events: the journal was replaced."""
        self._history = History()
        self._loads: dict[str, LoadHistory] = {}
        """Past utilization of the GPUs of the run in percent, by UUID."""
        self._loads_since = 0.0

    def add(self, event: Event) -> None:
        """Add an event of the journal."""
        self._history.add(event)
        if event.type == "gpus":
            sampled = cast("GpuEvent", event)
            self._loads_since = self._loads_since or event.time
            for sample in sampled.gpus:
                self._loads.setdefault(str(sample.uuid), LoadHistory()).add(event.time, sample.util)

    def publish(self, problem: str | None, *, is_reading: bool) -> None:
        """Publish the state; of a journal that is being read, that of the record. `problem` is that of the journal."""
        folder, history = self._folder, self._history
        row = read_row(folder) if is_reading else None
        if row is None:
            # Of a run that cannot be recorded, the journal does not say so.
            stored = read_run_record(folder)
            record = with_stored_metrics(history.record(None if stored is None else stored.config), stored)
            unrecorded = stored.problem if stored is not None and record.state.live else ""
            row = make_row(folder, codec.replace(record, problem=unrecorded), problem=problem)
        self.latest = RunSnapshot(
            row,
            rank_readings(history, self._loads, self._loads_since, live=row.live),
            tuple(history.failures),
            tuple(history.epochs[-MAX_LOG_EPOCHS:]),
            not folder.path.is_dir(),
            folder.resumable,
            folder.evaluation.exists(),
        )


class RunPoller(Poller):
    """Publishes the curves of a run while it reads them, and follows the run then.

    The journal of a training has both its curves and its state. The curves of a command are in its logs, like those of
    a run of another program. No `Watched`: it publishes between two slices.
    """

    def __init__(self, run: RunFolder | ForeignRun, is_busy: Callable[[], bool] = lambda: False) -> None:
        """`is_busy` tells whether the screen handles a key."""
        super().__init__("run", POLL_INTERVAL_SECONDS)
        self._is_busy = is_busy
        self.folder = run if isinstance(run, RunFolder) else None
        self._state: StateReader | None = None
        self._metrics: MetricsFinder | None = None
        self._journal: JournalSource | None = None
        """The journal of a command, which has no curves."""
        if isinstance(run, ForeignRun):
            self._follow(run)
        else:
            state = self._state = StateReader(run)
            if has_command(run):
                self._metrics = MetricsFinder(run)
                self._journal = JournalSource(run.journal, state.add, state.begin)
                self._follow(self._metrics.find())
            else:
                self._follow(journal_run(run, state.add, state.begin), MAX_STEP_COLUMNS)
        self.changed_at = 0.0
        """When a log was last written, in Unix seconds; 0 before the first poll, and if all logs are gone."""
        self.log_file: Path | None = None
        self._log: Watched[tuple[str, ...]] | None = None
        self._next_log_poll = 0.0
        self._was_shown = self._reads_again = False
        self._journal_problem: str | None = None
        """Why the journal cannot be read."""

    def _follow(self, run: ForeignRun, max_columns: int = MAX_METRIC_COLUMNS) -> None:
        self.run, self.reader = run, CurveReader(run, max_columns)
        self.caught_up = False
        """Whether all logs have been read to their ends."""

    def read_again(self) -> None:
        """Read all logs once more: what the user calls their metrics has changed."""
        self._reads_again = True

    @property
    def is_training(self) -> bool:
        """Whether the journal of the run has its curves."""
        return self.folder is not None and self._metrics is None

    @property
    def latest(self) -> RunSnapshot | None:
        """The latest state; None before the first poll, and of a run of another program."""
        return None if self._state is None else self._state.latest

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines of the log; none without one."""
        return (self._log.value or ()) if self._log is not None else ()

    def activity(self, writer_ended_at: float | None) -> Activity:
        """Whether a run of another program goes on, by its logs and the end of the process that wrote them."""
        has_ended = self.reader.has_ended
        return judge(self.changed_at, time.time(), has_ended=has_ended, writer_ended_at=writer_ended_at)

    def poll(self) -> None:
        # Else the first drawing imports it in the event loop.
        import_module("plotext")
        state, folder = self._state, self.folder
        if state is not None and state.latest is not None and folder is not None and not folder.path.is_dir():
            state.latest, self.caught_up = replace(state.latest, folder_missing=True), True
            return
        run = self.run if self._metrics is None else self._metrics.find()
        if self._reads_again or run.log_ids() != self.run.log_ids():
            self._reads_again = False
            self._follow(run)
        self._poll_log()
        self._read()
        if (
            folder is not None
            and not self.caught_up
            and not self._stop_event.is_set()
            and self._journal_problem is None
        ):
            # It completes the record of a run that crashed, or that has none.
            open_run(folder)
        self.caught_up = True

    def _read(self) -> None:
        """Read what is new in slices, and publish the state while and after that."""
        has_more, next_publish = True, 0.0
        while has_more and not self._stop_event.is_set():
            has_more = self.reader.read_slice(SLICE_BYTES)
            self.changed_at = self.run.changed_at()
            is_partial, problem = self.reader.share < 1, next(iter(self.reader.problems), None)
            if self._journal is not None:
                reading = self._journal.poll(SLICE_BYTES)
                is_partial, problem = reading.read_bytes < reading.total_bytes, reading.problem or None
                has_more = has_more or is_partial
            if self._state is not None and (not has_more or time.monotonic() >= next_publish):
                next_publish = time.monotonic() + STATE_SECONDS
                self._state.publish(problem, is_reading=is_partial)
            if not self._was_shown and (self.latest is not None or self.reader.curves.num_points):
                self._was_shown = True
                if self.on_first_result is not None:
                    # It is called again when the run has been read.
                    self.on_first_result()
            if has_more:
                self._pause()
        self._journal_problem = problem

    def _pause(self) -> None:
        """Leave the interpreter to the screen. A key that is held slows the reading down, and does not stop it."""
        self._stop_event.wait(SLICE_PAUSE_SECONDS)
        for _ in range(MAX_BUSY_PAUSES):
            if not self._is_busy() or self._stop_event.wait(BUSY_PAUSE_SECONDS):
                break

    def _poll_log(self) -> None:
        if time.monotonic() >= self._next_log_poll:
            # Finding the log of another program takes longer than looking whether one has grown.
            self._next_log_poll = time.monotonic() + LOG_INTERVAL_SECONDS
            path = log_of(self.folder) if self.folder is not None else find_log_file(self.run)
            if path != self.log_file:
                self.log_file, self._log = path, None if path is None else self._watch_log(path)
        if self._log is not None:
            self._log.poll()

    def _watch_log(self, path: Path) -> Watched[tuple[str, ...]]:
        if self.folder is None:
            return Watched(path.name, partial(read_log_tail, path), partial(file_stamp, path))
        return watch_log(path)

    def has_result(self) -> bool:
        return self.caught_up


def read_log_tail(path: Path) -> tuple[str, ...]:
    """Return the last lines of a log, which may be as long as the run. Raises OSError."""
    *older, log = log_files(path)
    text, start = _read_tail(log, MAX_LOG_BYTES)
    for full in reversed(older):
        # Of a log with a limit that has just begun a new file.
        if start == 0 and (room := MAX_LOG_BYTES - len(text)) > 0:
            with suppress(OSError):
                before, start = _read_tail(full, room)
                text = before + text
    lines = text.decode(errors="replace").splitlines()[1 if start else 0 :][-MAX_LOG_LINES:]
    return tuple(line[:MAX_LOG_LINE_LENGTH] for line in lines)


def watch_log(log: Path) -> Watched[tuple[str, ...]]:
    """Return a poller of the last lines of a run's log."""
    return Watched(log.name, partial(_read_log, log), partial(_log_stamp, log))


def _read_log(log: Path) -> tuple[str, ...]:
    """Return the last lines of a run's log, and below them those that may still change."""
    lines = read_log_tail(log)
    with suppress(OSError):
        lines += tuple(read_pending(log))
    return lines


def _log_stamp(log: Path) -> tuple[FileStamp | None, FileStamp | None] | None:
    stamps = file_stamp(log), find_file_stamp(pending_file(log))
    return stamps if any(stamps) else None


def _read_tail(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """Return the end of a file, and where it begins."""
    with open_regular_file(path) as file:
        start = max(os.fstat(file.fileno()).st_size - max_bytes, 0)
        file.seek(start)
        return file.read(max_bytes), start
