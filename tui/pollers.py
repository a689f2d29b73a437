"""Where screens get what they show: threads that ask the sampler, look at the runs and tail a journal, and hand on what
they find. A screen takes it when it draws, and waits for none of them."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.gpus.monitor import Monitor, open_monitor
from engine.gpus.snapshot import Snapshot, Wants
from engine.runs.events import Event
from engine.runs.folder import RunFolder, all_runs
from engine.runs.history import History
from engine.runs.journal import JournalReader
from engine.runs.watcher import SHORT_BYTES, RunWatch
from engine.utils.errors import UsageError
from engine.utils.files import open_to_read
from tui.text.runs import RunNow, RunRow, age_of, describe_run, row_of_history, unreadable_row

if TYPE_CHECKING:
    from tui.text.confusion import Evaluations

PERIOD_SECONDS = 1.0
RUN_PERIOD_SECONDS = 0.5
# A batch of events is handed on at a time, so that a screen that reads a long journal goes on answering keys.
BATCH_EVENTS = 400
BATCHES = 8
CHUNK_BYTES = SHORT_BYTES
LOG_BYTES = 1 << 16
LOG_LINES = 2000


@dataclass(frozen=True)
class Pace:
    """Seconds between two looks of the pollers, and the least between two drawings of the charts."""

    look: float = 1.0
    charts: float = 3.0


SLOW = Pace(5.0, 15.0)


class Feed:
    """A thread that looks again and again. `start` once; `close` asks it to end, and does not wait."""

    def __init__(self, name: str, period: float) -> None:
        self._period = period
        self._ended = threading.Event()
        self.fault: str | None = None
        """What went wrong at the latest look, in a way that nobody foresaw."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()

    def _work(self) -> None:
        try:
            while not self._ended.is_set():
                try:
                    self.look()
                    self.fault = None
                except Exception as error:
                    # What is shown would stand still without a word.
                    self.fault = f"it cannot be read: {type(error).__name__}: {error}"
                    self._ended.wait(1.0)
                self._ended.wait(self._period)
        finally:
            self.end()

    def look(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Called by the thread when it ends."""


class GpuFeed(Feed):
    """The newest snapshot of this host's GPUs, or why there is none."""

    def __init__(self, period: float = PERIOD_SECONDS, monitor: Monitor | None = None) -> None:
        super().__init__("gpus", 0.0)
        self._wants = Wants(period)
        self._monitor = monitor
        self.snapshot: Snapshot | None = None
        self.problem: str | None = None
        self.host: HostLoad | None = None

    def look(self) -> None:
        try:
            if self._monitor is None:
                self._monitor = open_monitor(self._wants)
            news = self._monitor.read(min(self._wants.period, 1.0))
        except (UsageError, OSError, ValueError) as error:
            self.problem = str(error)
            self._ended.wait(5.0)
            return
        self.problem = None
        latest = self._monitor.latest() if news is None else news
        self.snapshot = latest
        if latest is not None and not latest.gpus:
            self.host = host_load()

    def end(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


@dataclass(frozen=True)
class HostLoad:
    """Of the whole host: CPU in percent, memory in bytes."""

    cpu: float
    memory_used: int
    memory_total: int


def host_load() -> HostLoad:
    import psutil

    memory = psutil.virtual_memory()
    return HostLoad(psutil.cpu_percent(), memory.total - memory.available, memory.total)


def _marks(folder: RunFolder) -> list[tuple[int, int]]:
    """Size and time of change of the files that a run's state hangs on."""
    found = []
    for path in (folder.journal, folder.owner, folder.config):
        try:
            status = path.stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((-1, 0))
    return found


class RunsFeed(Feed):
    """The rows of all runs below a folder, those that were started last first. `wanted` false lets it rest."""

    def __init__(self, root: Path, period: float = PERIOD_SECONDS) -> None:
        super().__init__("runs", period)
        self._known: dict[Path, tuple[list[tuple[int, int]], RunRow]] = {}
        self._root = root
        self._watches: dict[Path, RunWatch] = {}
        self.wanted = True
        self.rows: list[RunRow] | None = None
        self.problem: str | None = None

    def look(self) -> None:
        if not self.wanted:
            return
        try:
            folders = all_runs(self._root)
        except UsageError as error:
            self.rows, self.problem = [], str(error)
            return
        self._watches = {folder.path: self._watches.get(folder.path) or RunWatch(folder) for folder in folders}
        self.rows = [self._row(watch) for watch in self._watches.values()]
        self.problem = None

    def _row(self, watch: RunWatch) -> RunRow:
        """A run that is over and whose files are as they were is not looked at again."""
        marks = _marks(watch.folder)
        marked, row = self._known.get(watch.folder.path, (None, None))
        if row is not None and not row.live and marked == marks:
            return replace(row, age_seconds=age_of(watch.folder))
        try:
            row = describe_run(watch)
        except Exception as error:
            row = unreadable_row(watch.folder, f"cannot be read: {type(error).__name__}: {error}")
        self._known[watch.folder.path] = (marks, row)
        return row


class RunFeed(Feed):
    """One run: its newest state at once, and all its events, oldest first, in a queue. One reader feeds both. Until it
    has read all of a long journal, the newest state comes from the two ends of that."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__("run", RUN_PERIOD_SECONDS)
        self.folder = folder
        self.now: RunNow | None = None
        self.events: queue.Queue[list[Event] | None] = queue.Queue(BATCHES)
        """Batches of events; None means that the journal began anew, and what was told no longer holds."""
        self.caught_up = False
        self._log = LogTail(folder.log)
        self._begin()

    def _begin(self) -> None:
        self._reader = JournalReader(self.folder.journal)
        self._history = History()
        self._ends: RunWatch | None = None

    def look(self) -> None:
        if self.now is not None and not self.folder.path.is_dir():
            self.now = replace(self.now, gone=True)
            self.caught_up = True
            return
        try:
            size = self.folder.journal.stat().st_size
        except OSError:
            # What was read is still true.
            size = self._reader.offset
        if size < self._reader.offset:
            self._begin()
            self._hand_on(None)
        if size - self._reader.offset > CHUNK_BYTES:
            self._ends = RunWatch(self.folder)
            self._look_at_state()
        while self._read_chunk(size) and not self._ended.is_set():
            pass
        self.caught_up = True

    def _read_chunk(self, size: int) -> bool:
        """Read on, publish the newest state and hand the events on. Return whether there is more, up to this size in
        bytes."""
        before = self._reader.offset
        events = list(self._reader.poll(CHUNK_BYTES))
        for event in events:
            self._history.add(event)
        # Without progress the journal is gone, or may not be read.
        more = before < self._reader.offset < size
        if not more:
            self._ends = None
        self._look_at_state()
        for start in range(0, len(events), BATCH_EVENTS):
            self._hand_on(events[start : start + BATCH_EVENTS])
        return more

    def _look_at_state(self) -> None:
        """Publish the newest state."""
        history = self._history if self._ends is None else self._ends.look()
        latest = history.latest_gpus
        self.now = RunNow(
            row_of_history(self.folder, history, partial=self._ends is not None and self._ends.partial),
            history.started,
            latest.gpus if latest else (),
            latest.time if latest else 0.0,
            self._log.lines(),
            not self.folder.path.is_dir(),
        )

    def _hand_on(self, batch: list[Event] | None) -> None:
        while not self._ended.is_set():
            with suppress(queue.Full):
                self.events.put(batch, timeout=0.2)
                return


class EvaluationFeed(Feed):
    """The evaluations of a run, read again when their file has changed; `problem` is why they cannot be."""

    def __init__(self, path: Path, period: float = 1.0) -> None:
        super().__init__("evaluation", period)
        self._path = path
        self._mark: tuple[int, ...] | None = None
        self.now: Evaluations | None = None
        self.problem: str | None = None
        self.looked = False

    def look(self) -> None:
        # It needs NumPy, which the first screen does without.
        from tui.text.confusion import read_evaluations

        try:
            status = self._path.stat()
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            if mark != self._mark:
                self.now, self.problem = read_evaluations(self._path), None
                self._mark = mark
        except FileNotFoundError:
            self.now, self.problem, self._mark = None, None, None
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"
        except ValueError as error:
            self.problem, self._mark = f"{self._path.name} cannot be read: {error}", mark
        self.looked = True


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
                with open_to_read(self._path) as file:
                    start = max(size - LOG_BYTES, 0)
                    file.seek(start)
                    text = file.read().decode(errors="replace")
                found = text.splitlines()[1 if start else 0 :]
                self._size, self._lines = size, tuple(found[-LOG_LINES:])
        except OSError:
            pass
        return self._lines
