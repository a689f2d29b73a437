"""The poller of one run, and what the preview of a run reads."""

from __future__ import annotations

import os
import queue
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engine.runs.folder import RunFolder
from engine.runs.log import log_files, pending_file, read_pending
from engine.runs.record_completion import open_run, with_stored_metrics
from engine.runs.run_record import read_run_record
from engine.runs.run_row import RunRow, make_row, read_row
from engine.utils import codec
from engine.utils.files import FileStamp, file_stamp, find_file_stamp, open_regular_file
from tui.charts.history import LoadHistory
from tui.pollers.watched import Poller, Watched
from tui.tables.ranks import rank_readings

if TYPE_CHECKING:
    from engine.runs.events import EpochEvent, Event, GpuEvent, RankFailed
    from engine.runs.history import History
    from tui.pollers.preview import PreviewReader
    from tui.tables.preview import RunPreview
    from tui.tables.ranks import RankReadings

RUN_POLL_INTERVAL_SECONDS = 0.5
# Events are queued in batches, so that a screen that loads a long journal stays responsive.
MAX_EVENTS_PER_BATCH, MAX_QUEUED_BATCHES = 400, 8
# The state of a run whose journal has more to read comes from its record first.
SHOWN_AT_ONCE_BYTES = 1 << 20
MAX_PREVIEWS = 64
# Epochs whose lines of the log are shown in columns.
MAX_LOG_EPOCHS = 60
MAX_LOG_BYTES = 1 << 16
MAX_LOG_LINES = 2000
# Longer lines fit on no screen, and are slow to draw.
MAX_LOG_LINE_LENGTH = 4096


@dataclass(frozen=True)
class RunSnapshot:
    """Latest state of a run, its ranks, the end of its log and its latest epochs."""

    row: RunRow
    ranks: RankReadings
    failures: tuple[RankFailed, ...] = ()
    log: tuple[str, ...] = ()
    epochs: tuple[EpochEvent, ...] = ()
    folder_missing: bool = False
    resumable: bool = False
    """Whether it has a checkpoint."""
    evaluated: bool = False
    """Whether it has an evaluation, for the confusion matrix."""


class RunPoller(Poller):
    """Publishes the latest state of one run, and queues all its events, oldest first; one journal follower feeds both.

    No `Watched`: the queue blocks it while the screen is busy, and it publishes between two chunks.
    While a long journal is being read, the state comes from the record of the run.
    """

    def __init__(self, folder: RunFolder, *, queues_events: bool = True) -> None:
        """Without `queues_events`, nobody reads them."""
        super().__init__("run", RUN_POLL_INTERVAL_SECONDS)
        self.folder, self._queues_events = folder, queues_events
        self.latest: RunSnapshot | None = None
        self.events: queue.Queue[list[Event] | None] = queue.Queue(MAX_QUEUED_BATCHES)
        """Batches of events; None means that the journal was replaced and earlier events are void."""
        self.caught_up = False
        self._log = Watched(folder.log.name, partial(_read_log, folder), partial(_log_stamp, folder))
        # Events take 0.1 s to import, and the first screen needs none.
        from engine.runs.journal_follower import JournalFollower

        self._journal = JournalFollower(folder.journal)
        self._begin()

    def _begin(self) -> None:
        from engine.runs.history import History

        self._history: History = History()
        self._is_reading = False
        self._loads: dict[str, LoadHistory] = {}
        """Past utilization of the GPUs of the run in percent, by UUID."""
        self._loads_since = 0.0

    def poll(self) -> None:
        if self.latest is not None and not self.folder.path.is_dir():
            self.latest = replace(self.latest, folder_missing=True)
            self.caught_up = True
            return
        if self._journal.look():
            self._begin()
            self._enqueue(None)
        if self._journal.unread_bytes > SHOWN_AT_ONCE_BYTES:
            self._is_reading = True
            self._poll_state()
        for events in self._journal.chunks(self._stop_event.is_set):
            self._add(events)
        if not self.caught_up and self._journal.problem is None:
            # It completes the record of a run that crashed, or that has none.
            open_run(self.folder)
        self.caught_up = True

    def _add(self, events: list[Event]) -> None:
        """Publish the state after these events, and queue them."""
        try:
            for event in events:
                self._history.add(event)
                if event.type == "gpus":
                    self._add_loads(cast("GpuEvent", event))
            self._is_reading = self._is_reading and self._journal.unread_bytes > 0
            self._poll_state()
        finally:
            # The journal is not read again: queue the events for the curves even if publishing the state failed.
            for start in range(0, len(events), MAX_EVENTS_PER_BATCH):
                self._enqueue(events[start : start + MAX_EVENTS_PER_BATCH])

    def _add_loads(self, event: GpuEvent) -> None:
        self._loads_since = self._loads_since or event.time
        for sample in event.gpus:
            self._loads.setdefault(str(sample.uuid), LoadHistory()).add(event.time, sample.util)

    def _poll_state(self) -> None:
        """Publish the latest state."""
        history, row = self._history, read_row(self.folder) if self._is_reading else None
        if row is None:
            # Of a run that cannot be recorded, the journal does not say so.
            stored = read_run_record(self.folder)
            record = with_stored_metrics(history.record(None if stored is None else stored.config), stored)
            problem = stored.problem if stored is not None and record.state.live else ""
            row = make_row(self.folder, codec.replace(record, problem=problem), problem=self._journal.problem)
        self._log.poll()
        self.latest = RunSnapshot(
            row,
            rank_readings(history, self._loads, self._loads_since, live=row.live),
            tuple(history.failures),
            self._log.value or (),
            tuple(history.epochs[-MAX_LOG_EPOCHS:]),
            not self.folder.path.is_dir(),
            self.folder.resumable,
            self.folder.evaluation.exists(),
        )

    def _enqueue(self, batch: list[Event] | None) -> None:
        while self._queues_events and not self._stop_event.is_set():
            with suppress(queue.Full):
                self.events.put(batch, timeout=0.2)
                return


class RunPreviews:
    """Reads the run that was requested last. It keeps the readers of `MAX_PREVIEWS` runs, so that a preview appears at
    once when its run is shown again."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._readers: dict[str, PreviewReader] = {}
        self._previews: dict[str, RunPreview] = {}

    def request(self, folder: str | None) -> None:
        """Read the run in `folder` next, or none."""
        self._folder = folder

    def find(self, folder: str) -> RunPreview | None:
        """Return the latest preview of a run; None if it has not been read."""
        return self._previews.get(folder)

    def read(self) -> RunPreview | None:
        """Return the preview of the requested run: the same object as before if the run has not changed."""
        folder = self._folder
        if folder is None:
            return None
        # Imports NumPy and the config schema, which the first screen does not need.
        from tui.pollers.preview import PreviewReader

        reader = self._readers.pop(folder, None) or PreviewReader(RunFolder(Path(folder)))
        self._readers[folder] = reader
        preview = self._previews[folder] = reader.poll()
        while len(self._readers) > MAX_PREVIEWS:
            oldest = next(iter(self._readers))
            del self._readers[oldest]
            # A run that could not be read has no preview.
            self._previews.pop(oldest, None)
        return preview


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


def _read_log(folder: RunFolder) -> tuple[str, ...]:
    """Return the last lines of a run's log, and below them those that may still change."""
    lines = read_log_tail(folder.log)
    with suppress(OSError):
        lines += tuple(read_pending(folder.log))
    return lines


def _log_stamp(folder: RunFolder) -> tuple[FileStamp | None, FileStamp | None] | None:
    stamps = file_stamp(folder.log), find_file_stamp(pending_file(folder.log))
    return stamps if any(stamps) else None


def _read_tail(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """Return the end of a file, and where it begins."""
    with open_regular_file(path) as file:
        start = max(os.fstat(file.fileno()).st_size - max_bytes, 0)
        file.seek(start)
        return file.read(max_bytes), start
