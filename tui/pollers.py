"""Where screens get what they show: threads that ask the sampler, look at the runs and tail a journal, and hand on what
they find. A screen takes it when it draws, and waits for none of them."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.gpus.monitor import GpuMonitor, open_monitor
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.runs.events import Event
from engine.runs.folder import RunFolder, list_runs
from engine.runs.history import History
from engine.runs.journal import JournalReader
from engine.runs.watcher import MAX_FULL_READ_BYTES, RunWatcher
from engine.utils.errors import UsageError
from engine.utils.files import open_regular_file
from tui.text.runs import RunRow, RunSnapshot, make_run_row, row_of_history, run_age_seconds, unreadable_row

if TYPE_CHECKING:
    from tui.text.confusion import RunEvaluations

POLL_INTERVAL_SECONDS = 1.0
RUN_POLL_INTERVAL_SECONDS = 0.5
# A batch of events is handed on at a time, so that a screen that reads a long journal goes on answering keys.
MAX_EVENTS_PER_BATCH = 400
MAX_QUEUED_BATCHES = 8
READ_CHUNK_BYTES = MAX_FULL_READ_BYTES
MAX_LOG_BYTES = 1 << 16
MAX_LOG_LINES = 2000


@dataclass(frozen=True)
class RefreshIntervals:
    """Seconds between two looks of the pollers, and the least between two drawings of the charts."""

    poll_s: float = 1.0
    charts_s: float = 3.0


LOW_BANDWIDTH_INTERVALS = RefreshIntervals(5.0, 15.0)


class Poller:
    """A thread that looks again and again. `start` once; `close` asks it to end, and does not wait."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._interval_s = interval_s
        self._stop_event = threading.Event()
        self.unexpected_error: str | None = None
        """What went wrong at the latest look, in a way that nobody foresaw."""
        self._thread = threading.Thread(target=self._poll_loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop_event.set()

    def _poll_loop(self) -> None:
        try:
            while not self._stop_event.is_set():
                try:
                    self.poll()
                    self.unexpected_error = None
                except Exception as error:
                    # What is shown would stand still without a word.
                    self.unexpected_error = f"it cannot be read: {type(error).__name__}: {error}"
                    self._stop_event.wait(1.0)
                self._stop_event.wait(self._interval_s)
        finally:
            self.cleanup()

    def poll(self) -> None:
        raise NotImplementedError

    def cleanup(self) -> None:
        """Called by the thread when it ends."""


class GpuPoller(Poller):
    """The newest snapshot of this host's GPUs, or why there is none."""

    def __init__(self, interval_s: float = POLL_INTERVAL_SECONDS, monitor: GpuMonitor | None = None) -> None:
        super().__init__("gpus", 0.0)
        self._options = SamplerOptions(interval_s)
        self._monitor = monitor
        self.snapshot: Snapshot | None = None
        self.problem: str | None = None
        self.host_load: HostLoad | None = None

    def poll(self) -> None:
        try:
            if self._monitor is None:
                self._monitor = open_monitor(self._options)
            news = self._monitor.read(min(self._options.period, 1.0))
        except (UsageError, OSError, ValueError) as error:
            self.problem = str(error)
            self._stop_event.wait(5.0)
            return
        self.problem = None
        latest = self._monitor.latest() if news is None else news
        self.snapshot = latest
        if latest is not None and not latest.gpus:
            self.host_load = host_load()

    def cleanup(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


@dataclass(frozen=True)
class HostLoad:
    """Of the whole host: CPU in percent, memory in bytes."""

    cpu_percent: float
    memory_used_bytes: int
    memory_total_bytes: int


def host_load() -> HostLoad:
    import psutil

    memory = psutil.virtual_memory()
    return HostLoad(psutil.cpu_percent(), memory.total - memory.available, memory.total)


def _file_stamps(folder: RunFolder) -> list[tuple[int, int]]:
    """Size and time of change of the files that a run's state hangs on."""
    found = []
    for path in (folder.journal, folder.owner, folder.config):
        try:
            status = path.stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((-1, 0))
    return found


class RunListPoller(Poller):
    """The rows of all runs below a folder, those that were started last first. `enabled` false lets it rest."""

    def __init__(self, runs_dir: Path, interval_s: float = POLL_INTERVAL_SECONDS) -> None:
        super().__init__("runs", interval_s)
        self._row_cache: dict[Path, tuple[list[tuple[int, int]], RunRow]] = {}
        self._runs_dir = runs_dir
        self._watchers: dict[Path, RunWatcher] = {}
        self.enabled = True
        self.rows: list[RunRow] | None = None
        self.problem: str | None = None

    def poll(self) -> None:
        if not self.enabled:
            return
        try:
            folders = list_runs(self._runs_dir)
        except UsageError as error:
            self.rows, self.problem = [], str(error)
            return
        self._watchers = {folder.path: self._watchers.get(folder.path) or RunWatcher(folder) for folder in folders}
        self.rows = [self._cached_row(watch) for watch in self._watchers.values()]
        self.problem = None

    def _cached_row(self, watcher: RunWatcher) -> RunRow:
        """A run that is over and whose files are as they were is not looked at again."""
        marks = _file_stamps(watcher.folder)
        marked, row = self._row_cache.get(watcher.folder.path, (None, None))
        if row is not None and not row.live and marked == marks:
            return replace(row, age_seconds=run_age_seconds(watcher.folder))
        try:
            row = make_run_row(watcher)
        except Exception as error:
            row = unreadable_row(watcher.folder, f"cannot be read: {type(error).__name__}: {error}")
        self._row_cache[watcher.folder.path] = (marks, row)
        return row


class RunPoller(Poller):
    """One run: its newest state at once, and all its events, oldest first, in a queue. One reader feeds both. Until it
    has read all of a long journal, the newest state comes from the two ends of that."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__("run", RUN_POLL_INTERVAL_SECONDS)
        self.folder = folder
        self.latest: RunSnapshot | None = None
        self.events: queue.Queue[list[Event] | None] = queue.Queue(MAX_QUEUED_BATCHES)
        """Batches of events; None means that the journal began anew, and what was told no longer holds."""
        self.caught_up = False
        self._log = LogTail(folder.log)
        self._begin()

    def _begin(self) -> None:
        self._reader = JournalReader(self.folder.journal)
        self._history = History()
        self._ends: RunWatcher | None = None

    def poll(self) -> None:
        if self.latest is not None and not self.folder.path.is_dir():
            self.latest = replace(self.latest, folder_missing=True)
            self.caught_up = True
            return
        try:
            size = self.folder.journal.stat().st_size
        except OSError:
            # What was read is still true.
            size = self._reader.offset
        if size < self._reader.offset:
            self._begin()
            self._enqueue(None)
        if size - self._reader.offset > READ_CHUNK_BYTES:
            self._ends = RunWatcher(self.folder)
            self._poll_state()
        while self._read_chunk(size) and not self._stop_event.is_set():
            pass
        self.caught_up = True

    def _read_chunk(self, size: int) -> bool:
        """Read on, publish the newest state and hand the events on. Return whether there is more, up to this size in
        bytes."""
        before = self._reader.offset
        events = list(self._reader.poll(READ_CHUNK_BYTES))
        try:
            for event in events:
                self._history.add(event)
            # Without progress the journal is gone, or may not be read.
            more = before < self._reader.offset < size
            if not more:
                self._ends = None
            self._poll_state()
        finally:
            # The reader is past these events, so the curves get them also where the state cannot be shown.
            for start in range(0, len(events), MAX_EVENTS_PER_BATCH):
                self._enqueue(events[start : start + MAX_EVENTS_PER_BATCH])
        return more

    def _poll_state(self) -> None:
        """Publish the newest state."""
        history = self._history if self._ends is None else self._ends.poll()
        latest = history.latest_gpus
        self.latest = RunSnapshot(
            row_of_history(self.folder, history, partial=self._ends is not None and self._ends.partial),
            history.started,
            latest.gpus if latest else (),
            latest.time if latest else 0.0,
            self._log.lines(),
            not self.folder.path.is_dir(),
        )

    def _enqueue(self, batch: list[Event] | None) -> None:
        while not self._stop_event.is_set():
            with suppress(queue.Full):
                self.events.put(batch, timeout=0.2)
                return


class EvaluationPoller(Poller):
    """The evaluations of a run, read again when their file has changed; `problem` is why they cannot be."""

    def __init__(self, path: Path, interval_s: float = 1.0) -> None:
        super().__init__("evaluation", interval_s)
        self._path = path
        self._file_stamp: tuple[int, ...] | None = None
        self.latest: RunEvaluations | None = None
        self.problem: str | None = None
        self.has_polled = False

    def poll(self) -> None:
        # It needs NumPy, which the first screen does without.
        from tui.text.confusion import read_evaluations

        try:
            status = self._path.stat()
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            if mark != self._file_stamp:
                self.latest, self.problem = read_evaluations(self._path), None
                self._file_stamp = mark
        except FileNotFoundError:
            self.latest, self.problem, self._file_stamp = None, None, None
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"
        except ValueError as error:
            self.problem, self._file_stamp = f"{self._path.name} cannot be read: {error}", mark
        self.has_polled = True


class LogTail:
    """The last lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1
        self._lines: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        try:
            size = self._path.stat().st_size
            if size != self._size:
                with open_regular_file(self._path) as file:
                    start = max(size - MAX_LOG_BYTES, 0)
                    file.seek(start)
                    text = file.read().decode(errors="replace")
                found = text.splitlines()[1 if start else 0 :]
                self._size, self._lines = size, tuple(found[-MAX_LOG_LINES:])
        except OSError:
            pass
        return self._lines
