"""Copy runs to one service: read their journals, send what is new, end a remote run when its run has ended.

`gputrain runs sync` calls it. Each step is sent once, with the values of the session that counts: the journal is
scanned for resumes first, and steps that a later session repeats are not sent. If a resume voids steps that were sent
before, the remote run is replaced by one that gets all valid steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from engine.runs.events import RunResumed, RunStarted
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import History
from engine.runs.journal import JournalReader
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import Better, own_metrics, recorded_metrics
from engine.runs.record_completion import open_run
from engine.runs.run_record import RunRecord
from engine.sync.description import describe_run
from engine.sync.remote import RemoteRun, Service, SyncError
from engine.sync.rows import Row, RowBuilder
from engine.sync.state import RemoteState, StateFile
from engine.utils.files import file_size

POLL_SECONDS = 1.0
# Between attempts to reach a service that was there when the command started.
RETRY_SECONDS = 15.0
# The state is written before and after each batch.
BATCH_ROWS = 500


class RunSync:
    """Copies one run. Call `poll` until it returns True, then `close`.

    Once `stop` returns True, `poll` returns before it has read everything.
    """

    def __init__(
        self, folder: RunFolder, service: Service, state_file: StateFile, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.folder = folder
        self.state: RemoteState = state_file.read(service.destination)
        self.run_state = RunState.STARTING
        self.problem: str | None = None
        """Why a part of the journal cannot be read."""
        self.replaced = False
        """Whether the remote run was replaced because a resume voided steps of it."""
        self.steps_sent = 0
        """Number of rows that this process has sent."""
        self._service = service
        self._state_file = state_file
        self._stop = stop
        self._reading: _Reading | None = None
        self._journal_bytes_read = -1

    def poll(self) -> bool:
        """Send what is new. Return whether the run has ended and its remote run is complete.

        Raises SyncError; the next call then continues with what the remote run has.
        """
        try:
            return self._poll()
        except SyncError:
            self._reading = None
            raise

    def close(self) -> None:
        """End sending to a run that goes on. Raises SyncError."""
        reading, self._reading = self._reading, None
        if reading is not None:
            with self._service.reported_errors():
                reading.remote.leave()
            # Not earlier: a library may keep rows in memory.
            self._save(journal_bytes=self._journal_bytes_read)

    def _poll(self) -> bool:
        # First the state and then the journal: that of an ended run is complete.
        record, self.run_state = open_run(self.folder)
        ended, size = not self.run_state.live, file_size(self.folder.journal)
        if size == 0 or (record.ranks is None and not ended):
            return ended
        digest = describe_run(self.folder, None).digest()
        sent = (self.state.journal_bytes, self.state.description, self.state.ended)
        if self._reading is None and sent == (size, digest, self.run_state.value if ended else ""):
            return ended
        if self._reading is not None and size < self._reading.reader.offset:
            # Another journal has taken its place.
            self.close()
        if self._reading is None:
            self._reading = self._begin()
        reading = self._reading
        if self.state.description != digest:
            with self._service.reported_errors():
                reading.remote.describe(describe_run(self.folder, reading.first_start))
            self._save(description=digest)
        reading = self._read(reading)
        if self._stop():
            return False
        self._journal_bytes_read = size
        if ended:
            self._finish(reading)
            self._save(journal_bytes=size, ended=self.run_state.value)
        return ended

    def _begin(self) -> _Reading:
        """Open the remote run, and read the journal from its beginning."""
        first_start, resumed_from = None, []
        for event in JournalReader(self.folder.journal).poll():
            if isinstance(event, RunResumed):
                resumed_from.append(event.from_step)
            elif isinstance(event, RunStarted):
                first_start = first_start or event
        is_void = min(resumed_from[self.state.sessions :], default=math.inf) < self.state.intended_step
        # A new remote run has its name in the state before it is created, so that there is never a second one.
        self._save(void=int(is_void or self.state.void))
        self.replaced = self.replaced or bool(self.state.void)
        description = describe_run(self.folder, first_start)
        with self._service.reported_errors():
            remote = self._service.open(self.state, description, self._save)
        self._save(location=remote.location, description=description.digest(), journal_bytes=-1, ended="")
        self._journal_bytes_read = -1
        return _Reading(remote, JournalReader(self.folder.journal), first_start, resumed_from)

    def _read(self, reading: _Reading) -> _Reading:
        """Send the rows of what the journal has gained. Return the reading, a new one after a replacement."""
        for event in reading.reader.poll():
            if isinstance(event, RunResumed):
                if reading.is_new_resume and event.from_step < self.state.intended_step:
                    self.close()
                    self._reading = self._begin()
                    return self._read(self._reading)
                self._send(reading)
                reading.begin_session(event)
            reading.history.add(event)
            reading.latest_time = event.time
            for row in reading.builder.add(event):
                self._add(reading, row)
            if self._stop():
                return reading
        self.problem = self.problem or reading.reader.problem
        self._send(reading)
        return reading

    def _add(self, reading: _Reading, row: Row) -> None:
        reading.rows.append(row)
        if len(reading.rows) >= BATCH_ROWS:
            self._send(reading)

    def _send(self, reading: _Reading) -> None:
        rows = [row for row in reading.rows if row.step > reading.remote.held_step]
        reading.rows.clear()
        if not rows:
            return
        last_step = max(max(row.step, row.epoch_step) for row in rows)
        self._save(intended_step=max(self.state.intended_step, last_step), sessions=reading.sessions)
        with self._service.reported_errors():
            reading.remote.send(rows)
        reading.remote.held_step = rows[-1].step
        self.steps_sent += len(rows)
        self._save(sent_step=rows[-1].step)

    def _finish(self, reading: _Reading) -> None:
        for row in reading.builder.end_session():
            self._add(reading, row)
        self._send(reading)
        finished = reading.history.finished
        end = finished.time if finished is not None else reading.latest_time
        record = reading.history.record()
        directions = read_directions(self.folder.path.parent)
        row = Row(max(reading.builder.last_step, 1), end, _final_metrics(record, directions))
        with self._service.reported_errors():
            reading.remote.finish(self.run_state, row, record.message)
        self._reading = None

    def _save(self, **changes: str | int) -> None:
        for name, value in changes.items():
            setattr(self.state, name, value)
        try:
            self._state_file.write(self._service.destination, self.state)
        except OSError as error:
            # Without it, the next sync would send the same steps again.
            raise SyncError(
                f"{self.folder.name}: its sync state cannot be written: {error.strerror}", code="not-writable"
            ) from error


@dataclass
class _Reading:
    """An open remote run, and a journal that is read from its beginning for it."""

    remote: RemoteRun
    reader: JournalReader
    first_start: RunStarted | None
    resumed_from: list[int]
    """Step from which each session after the first continues, as far as known."""
    builder: RowBuilder = field(default_factory=RowBuilder)
    history: History = field(default_factory=History)
    sessions: int = 0
    """Number of resumes that were read."""
    rows: list[Row] = field(default_factory=list)
    """Rows that are not sent yet."""
    latest_time: float = 0.0
    """Time of the latest event, in Unix seconds."""

    def __post_init__(self) -> None:
        self._limit_steps()

    @property
    def is_new_resume(self) -> bool:
        """Whether the next resume was not in the journal when it was scanned."""
        return self.sessions >= len(self.resumed_from)

    def begin_session(self, event: RunResumed) -> None:
        """Count a resume."""
        if self.is_new_resume:
            self.resumed_from.append(event.from_step)
        self.sessions += 1
        self._limit_steps()

    def _limit_steps(self) -> None:
        self.builder.valid_until = min(self.resumed_from[self.sessions :], default=math.inf)


def _final_metrics(record: RunRecord, directions: Mapping[str, Better]) -> dict[str, float]:
    """Return the final metrics of a run that are known."""
    values = {
        f"summary/{metric.key}": metric.of_run(record) for metric in recorded_metrics(own_metrics([record], directions))
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def sync_runs(
    syncs: Sequence[RunSync],
    *,
    follow: bool,
    stop: Callable[[], bool],
    on_progress: Callable[[RunSync, bool], None],
    on_interruption: Callable[[SyncError], None],
) -> None:
    """Poll each run once, or with `follow` until all have ended or `stop` returns True.

    `on_progress` gets each run after each poll, and whether it is complete. Once every run was sent once, a service
    that cannot be reached is tried again, and `on_interruption` gets the error. Raises SyncError.
    """
    pending, is_first_round = list(syncs), True
    with ExitStack() as stack:
        # Each is closed, even where another cannot be.
        for sync in reversed(syncs):
            stack.callback(sync.close)
        while pending:
            pause = POLL_SECONDS
            try:
                for sync in list(pending):
                    complete = sync.poll()
                    on_progress(sync, complete)
                    if complete:
                        pending.remove(sync)
                    if stop():
                        return
            except SyncError as error:
                if is_first_round or not error.temporary:
                    raise
                on_interruption(error)
                pause = RETRY_SECONDS
            if not follow:
                return
            is_first_round = False
            _wait(pause, stop)


def _wait(seconds: float, stop: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not stop() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
