"""Follow the state of a run while it is written, for `gputrain runs` and the screen.

Each poll reads only the new lines. The first poll of a long journal reads only its end, and searches a bounded part of
it for the start of the session, because the journal may come from another user.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from engine.runs.events import (
    EpochEvent,
    Event,
    GpusGranted,
    RunContinued,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
    StepEvent,
    WaitingForGpus,
)
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.runs.journal import MAX_LINE_BYTES, JournalReader, find_last_event, from_line, long_line_problem
from engine.utils.files import open_regular_file

# Larger journals are read only at their end.
MAX_FULL_READ_BYTES = 1 << 20
TAIL_BYTES = 1 << 18
START_EVENTS = (RunStarted, RunResumed)
# Events that determine whether a run trains, is paused or has ended.
STATE_EVENTS = (
    *(*START_EVENTS, StepEvent, EpochEvent, RunPaused, RunContinued, RunFinished),
    *(WaitingForGpus, GpusGranted),
)


class RunWatcher:
    """Latest state of one run.

    For a long journal (`partial`), `history` contains only the start event and the latest events; the best epoch and
    the number of epochs are then in `summary.json`. `problem` says why the journal or a part of it cannot be read.
    """

    def __init__(self, folder: RunFolder, *, max_full_read: int | None = None, tail_bytes: int | None = None) -> None:
        """A journal of up to `max_full_read` bytes (default: MAX_FULL_READ_BYTES) is read as a whole. Of a larger one,
        the last `tail_bytes` (default: TAIL_BYTES) are read."""
        self.folder = folder
        self._max_full_read = MAX_FULL_READ_BYTES if max_full_read is None else max_full_read
        self._tail_bytes = TAIL_BYTES if tail_bytes is None else tail_bytes
        self.bytes_read = 0
        self._reset()

    def _reset(self) -> None:
        self.history = History()
        self.problem: str | None = None
        self.partial = False
        """Whether only the end of the journal was read."""
        self._reader: JournalReader | None = None

    def poll(self) -> History:
        """Read new events and return the history. Starts over if the journal was deleted or truncated."""
        journal = self.folder.journal
        try:
            size = journal.stat().st_size
        except OSError:
            self._reset()
            return self.history
        if self._reader is not None and size < self._reader.offset:
            self._reset()
        if self._reader is None:
            reader = JournalReader(journal)
            if size > self._max_full_read:
                try:
                    events, reader.offset = read_latest_events(journal, size, self._tail_bytes)
                except OSError as error:
                    self.problem = f"{journal.name} cannot be read: {error.strerror}"
                    return self.history
                self.partial = True
                if reader.offset < size - MAX_LINE_BYTES:
                    self.problem, reader.offset = long_line_problem(journal), size
                self.bytes_read += min(self._tail_bytes, size)
                for event in events:
                    self.history.add(event)
            self._reader = reader
        old_offset = self._reader.offset
        for event in self._reader.poll():
            self.history.add(event)
        self.bytes_read += self._reader.offset - old_offset
        self.problem = self.problem or self._reader.problem
        return self.history


def read_latest_events(journal: Path, size: int, tail_bytes: int = TAIL_BYTES) -> tuple[list[Event], int]:
    """Read the start event of the latest session, and the events in the last `tail_bytes` of a journal of `size` bytes,
    among them one of `STATE_EVENTS`.

    Returns the events, and the byte offset of the end of the last complete line, 0 if there is no line in the last
    `MAX_LINE_BYTES`. Raises OSError.
    """
    with open_regular_file(journal) as file:
        end = _end_of_last_line(file, size)
        start = max(end - tail_bytes, 0)
        file.seek(start)
        # The tail may begin in the middle of a line.
        lines = file.read(end - start).split(b"\n")[min(start, 1) :]
        events = [event for line in lines if (event := from_line(line))]
        if start == 0:
            return events, end
        earlier: list[Event | None] = []
        # The first line of the tail, which is skipped, may begin at byte `start`.
        if not any(isinstance(event, STATE_EVENTS) for event in events):
            earlier = [find_last_event(file, start + 1, STATE_EVENTS)]
        if not any(isinstance(event, START_EVENTS) for event in (*earlier, *events)):
            session_start = find_last_event(file, start + 1, START_EVENTS) if earlier != [None] else None
            # The session of a run that was never resumed starts near the beginning.
            earlier.insert(0, session_start or find_last_event(file, TAIL_BYTES, START_EVENTS))
        return [*filter(None, earlier), *events], end


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    """Return the offset of the end of the last complete line, 0 if it is not in the last `MAX_LINE_BYTES`."""
    for length in (TAIL_BYTES, MAX_LINE_BYTES):
        start = max(size - length, 0)
        file.seek(start)
        position = file.read(size - start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
    return 0
