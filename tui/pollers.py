"""Background threads that read GPU snapshots, run lists, journals and evaluations for the screens.

Screens read the latest published values when they draw and never wait for a poller.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engine.gpus.monitor import GpuMonitor, open_monitor
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.runs.folder import RunFolder, RunState
from engine.runs.record_completion import store_completed_record
from engine.runs.run_list import RunList
from engine.runs.run_record import read_run_record
from engine.runs.run_row import RunRow, make_row, read_row
from engine.utils import codec
from engine.utils.codec import InvalidRecordError
from engine.utils.errors import Problem, UsageError
from tui.charts.gpu_loads import GpuLoads
from tui.charts.rank_loads import RankLoads
from tui.log_tail import LogTail
from tui.text.ranks import rank_readings
from tui.text.runs import RunSnapshot
from tui.text.waiting import WaitingRun, read_waiting_runs

if TYPE_CHECKING:
    from engine.runs.evaluations import RunEvaluations
    from engine.runs.events import Event, GpuEvent
    from engine.runs.history import History
    from engine.runs.journal import JournalReader
    from engine.runs.records import RankDevice
    from tui.text.preview import RunPreview
    from tui.text.preview_reader import PreviewReader

POLL_INTERVAL_SECONDS = 1.0
RUN_POLL_INTERVAL_SECONDS = 0.5
# Events are queued in batches, so that a screen that loads a long journal stays responsive.
MAX_EVENTS_PER_BATCH, MAX_QUEUED_BATCHES = 400, 8
# A run list is read in parts, short ones for the first page. Each part takes the time to sort the runs read so far.
FIRST_READ_SECONDS, FIRST_RUNS = 0.1, 100
READ_SECONDS, READ_PAUSE_SECONDS = 0.5, 0.02
READ_CHUNK_BYTES = 1 << 20
MAX_PREVIEWS = 64
# Epochs whose lines of the log are shown in columns.
MAX_LOG_EPOCHS = 60


@dataclass(frozen=True)
class RefreshIntervals:
    """Seconds between polls, and the minimum number of seconds between chart redraws."""

    poll_s: float = 1.0
    charts_s: float = 3.0


LOW_BANDWIDTH_INTERVALS = RefreshIntervals(5.0, 15.0)


class Poller:
    """A daemon thread that calls `poll` periodically. `close` requests its end without waiting for it."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._interval_s = interval_s
        self._stop_event = threading.Event()
        self._wake_event = threading.Event()
        self.on_first_result: Callable[[], None] | None = None
        """Called once, in the thread, when the poller has its first result, and before for a part of it."""
        self.unexpected_error: Problem | None = None
        """Message of an unexpected exception in the latest poll."""
        self._thread = threading.Thread(target=self._poll_loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop_event.set()
        self._wake_event.set()

    def request_poll(self) -> None:
        """Poll at once, without waiting for the end of the interval."""
        self._wake_event.set()

    def _poll_loop(self) -> None:
        try:
            while not self._stop_event.is_set():
                try:
                    self.poll()
                    self.unexpected_error = None
                    if self.on_first_result is not None and self.has_result():
                        self.on_first_result()
                        self.on_first_result = None
                except Exception as error:
                    # An uncaught exception would end the thread and silently freeze the screen.
                    reason = f"unexpected error: {type(error).__name__}: {error}"
                    self.unexpected_error = Problem("", reason, code="internal-error")
                    self._stop_event.wait(1.0)
                self._wake_event.wait(self._interval_s)
                self._wake_event.clear()
        finally:
            self.cleanup()

    def poll(self) -> None:
        """Read once and publish the result; called in the thread."""
        raise NotImplementedError

    def has_result(self) -> bool:
        """Whether a poll has published a result."""
        return True

    def cleanup(self) -> None:
        """Release resources; called by the thread before it ends."""


class GpuPoller(Poller):
    """Publishes the latest snapshot of the GPUs of this host and their past load, or the problem that prevents it."""

    def __init__(self, interval_s: float = POLL_INTERVAL_SECONDS, monitor: GpuMonitor | None = None) -> None:
        super().__init__("gpus", 0.0)
        self._options = SamplerOptions(period=interval_s)
        self._monitor = monitor
        self.snapshot: Snapshot | None = None
        self.loads = GpuLoads()
        self.problem: Problem | None = None

    def poll(self) -> None:
        try:
            if self._monitor is None:
                self._monitor = open_monitor(self._options)
            snapshot = self._monitor.read(min(self._options.period, 1.0))
        except (UsageError, OSError, ValueError) as error:
            self.problem = (
                error.problems[0] if isinstance(error, UsageError) else Problem("", str(error), code="not-readable")
            )
            self._stop_event.wait(5.0)
            return
        self.problem = None
        if snapshot is not None:
            self.loads.record(snapshot)
        latest = self._monitor.latest() if snapshot is None else snapshot
        self.snapshot = latest

    def has_result(self) -> bool:
        return self.snapshot is not None

    def cleanup(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


class RunListPoller(Poller):
    """Publishes the rows of all runs in a folder, latest start first; `enabled = False` suspends it.

    Of thousands of runs, the newest are published first, and `complete` tells when all are. The same list object
    means that no row has changed.
    """

    def __init__(self, runs_dir: Path, interval_s: float = POLL_INTERVAL_SECONDS) -> None:
        super().__init__("runs", interval_s)
        self._list = RunList(runs_dir)
        self.enabled = True
        self.rows: list[RunRow] | None = None
        self.complete = False
        """Whether `rows` are all runs."""
        self.count = 0
        """Number of runs, read or not."""
        self.waiting: list[WaitingRun] = []
        self.cpu_ranks: list[tuple[str, RankDevice]] = []
        """The ranks of live runs that train on the CPU of this host, with the names of their runs."""
        self.problem: Problem | None = None

    def poll(self) -> None:
        if not self.enabled:
            return
        self._poll_once()
        if not self.complete and self.on_first_result is not None:
            # For the first page; it is called again when all runs have been read.
            self.on_first_result()
        while not self.complete and self.problem is None and not self._stop_event.is_set():
            # Leaves the interpreter to the thread that draws.
            self._stop_event.wait(READ_PAUSE_SECONDS)
            self._poll_once()

    def _poll_once(self) -> None:
        try:
            self._list.poll(FIRST_READ_SECONDS if len(self._list.rows) < FIRST_RUNS else READ_SECONDS)
        except UsageError as error:
            self.rows, self.problem, self.complete = [], error.problems[0], True
            return
        waiting = read_waiting_runs()
        self.cpu_ranks = [
            (row.name, rank)
            for row in self._list.rows
            if row.live
            for rank in row.record.rank_devices
            if rank.device == "cpu" and rank.host == socket.gethostname()
        ]
        self.rows, self.complete, self.count = self._list.rows, self._list.complete, self._list.count
        # Most runs of this user are among the rows, as waiting ones.
        folders = {row.folder for row in self.rows or () if row.state == RunState.WAITING}
        self.waiting = [run for run in waiting if run.folder not in folders]
        self.problem = None

    def has_result(self) -> bool:
        return self.rows is not None


class RunPoller(Poller):
    """Publishes the latest state of one run, and queues all its events, oldest first; one journal reader feeds both.

    While a long journal is being read, the state comes from the record of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__("run", RUN_POLL_INTERVAL_SECONDS)
        self.folder = folder
        self.latest: RunSnapshot | None = None
        self.events: queue.Queue[list[Event] | None] = queue.Queue(MAX_QUEUED_BATCHES)
        """Batches of events; None means that the journal was replaced and earlier events are void."""
        self.caught_up = False
        self._log = LogTail(folder.log)
        self._begin()

    def _begin(self) -> None:
        from engine.runs.history import History
        from engine.runs.journal import JournalReader

        self._reader: JournalReader = JournalReader(self.folder.journal)
        self._history: History = History()
        self._is_reading = False
        self._loads = RankLoads()

    def poll(self) -> None:
        if self.latest is not None and not self.folder.path.is_dir():
            self.latest = replace(self.latest, folder_missing=True)
            self.caught_up = True
            return
        try:
            size = self.folder.journal.stat().st_size
        except OSError:
            # The journal is gone; keep what was read.
            size = self._reader.offset
        if size < self._reader.offset:
            self._begin()
            self._enqueue(None)
        if size - self._reader.offset > READ_CHUNK_BYTES:
            self._is_reading = True
            self._poll_state()
        while self._read_chunk(size) and not self._stop_event.is_set():
            pass
        if not self.caught_up and self._reader.problem is None:
            # The record of a run that crashed, or that has none.
            store_completed_record(self.folder, self._history, self._reader.offset)
        self.caught_up = True

    def _read_chunk(self, size: int) -> bool:
        """Read one chunk, publish the state and queue the events. Return whether more follow before byte `size`."""
        start_offset = self._reader.offset
        events = list(self._reader.poll(READ_CHUNK_BYTES))
        try:
            for event in events:
                self._history.add(event)
                if event.type == "gpus":
                    self._loads.add(cast("GpuEvent", event))
            # No progress means that the journal is gone or unreadable.
            more = start_offset < self._reader.offset < size
            if not more:
                self._is_reading = False
            self._poll_state()
        finally:
            # The reader has consumed these events: queue them for the curves even if publishing the state failed.
            for start in range(0, len(events), MAX_EVENTS_PER_BATCH):
                self._enqueue(events[start : start + MAX_EVENTS_PER_BATCH])
        return more

    def _poll_state(self) -> None:
        """Publish the latest state."""
        history, row = self._history, read_row(self.folder) if self._is_reading else None
        if row is None:
            # Of a run that cannot be recorded, the journal does not say so.
            stored = read_run_record(self.folder)
            record = history.record(None if stored is None else stored.config)
            problem = stored.problem if stored is not None and record.state.live else ""
            row = make_row(self.folder, codec.replace(record, problem=problem), problem=self._reader.problem)
        if row.live and history.started is not None:
            self._loads.measure_cpu(history.started, time.time())
        self.latest = RunSnapshot(
            row,
            rank_readings(history, self._loads, live=row.live),
            tuple(history.failures),
            self._log.lines(),
            tuple(history.epochs[-MAX_LOG_EPOCHS:]),
            not self.folder.path.is_dir(),
            self.folder.resumable,
            self.folder.evaluation.exists(),
        )

    def _enqueue(self, batch: list[Event] | None) -> None:
        while not self._stop_event.is_set():
            with suppress(queue.Full):
                self.events.put(batch, timeout=0.2)
                return


class PreviewPoller(Poller):
    """Reads the run that was requested last, and follows it; calls `publish` in the thread when there is more to show.

    The readers of the last `MAX_PREVIEWS` runs are kept, so that a preview appears at once when its run is shown again.
    """

    def __init__(self, publish: Callable[[], object], refresh_s: float = RefreshIntervals.charts_s) -> None:
        super().__init__("preview", 0.0)
        self._publish, self._refresh_s = publish, refresh_s
        self._requested = threading.Event()
        self._folder: str | None = None
        self._readers: dict[str, PreviewReader] = {}
        self._previews: dict[str, RunPreview] = {}

    def request(self, folder: str | None) -> None:
        """Read and follow the run in `folder`, or none."""
        self._folder = folder
        self._requested.set()

    def find(self, folder: str) -> RunPreview | None:
        """Return the latest preview of a run; None if it has not been read."""
        return self._previews.get(folder)

    def close(self) -> None:
        super().close()
        self._requested.set()

    def poll(self) -> None:
        self._requested.wait(self._refresh_s)
        self._requested.clear()
        folder = self._folder
        if folder is None or self._stop_event.is_set():
            return
        # Imports NumPy and the config schema, which the first screen does not need.
        from tui.text.preview_reader import PreviewReader

        reader = self._readers.pop(folder, None) or PreviewReader(RunFolder(Path(folder)))
        self._readers[folder] = reader
        preview = reader.poll()
        if preview is not self._previews.get(folder):
            self._previews[folder] = preview
            self._publish()
        while len(self._readers) > MAX_PREVIEWS:
            oldest = next(iter(self._readers))
            del self._readers[oldest], self._previews[oldest]


class EvaluationPoller(Poller):
    """Publishes the evaluations of a run and rereads them when `evaluation.json` changes."""

    def __init__(self, path: Path, interval_s: float = 1.0) -> None:
        super().__init__("evaluation", interval_s)
        self._path = path
        self._file_stamp: tuple[int, ...] | None = None
        self.latest: RunEvaluations | None = None
        self.problem: Problem | None = None
        self.has_polled = False

    def poll(self) -> None:
        # Imports NumPy, which the first screen does not need.
        from engine.runs.evaluations import read_evaluations

        try:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            if stamp != self._file_stamp:
                self.latest, self.problem = read_evaluations(self._path), None
                self._file_stamp = stamp
        except FileNotFoundError:
            self.latest, self.problem, self._file_stamp = None, None, None
        except OSError as error:
            self.problem = Problem("", f"{self._path.name} cannot be read: {error.strerror}", code="not-readable")
        except InvalidRecordError as error:
            self.problem = Problem("", f"{self._path.name} {error}", code=error.code)
            self._file_stamp = stamp
        self.has_polled = True
