"""Follow the state of a run while it is written, for `gputrain runs` and the screen.

Each poll reads only the new lines. The first poll of a long journal reads only its beginning and its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from engine.runs.events import (
    EpochEvent,
    Event,
    RunContinued,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
    StepEvent,
)
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.runs.journal import JournalReader, from_line
from engine.utils.files import open_regular_file

# Larger journals are read only at both ends.
MAX_FULL_READ_BYTES = 1 << 20
INITIAL_TAIL_BYTES = 1 << 18
MAX_START_LINE_BYTES = 1 << 16
SCAN_BLOCK_BYTES = 1 << 20
# Events that determine whether a run trains, is paused or has ended.
STATE_EVENTS = (RunStarted, StepEvent, EpochEvent, RunPaused, RunContinued, RunFinished)


class RunWatcher:
    """Latest state of one run.

    For a long journal (`partial`), `history` contains only the start event and the latest events; the best epoch and
    the number of epochs are then in `summary.json`.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._reset()

    def _reset(self) -> None:
        self.history = History()
        self.partial = False
        """Whether only the ends of the journal were read."""
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
            if size > MAX_FULL_READ_BYTES:
                try:
                    events, reader.offset, parsed_bytes = read_head_and_tail(journal, size)
                except OSError:
                    return self.history
                self.partial = True
                self.bytes_read += parsed_bytes
                for event in events:
                    self.history.add(event)
            self._reader = reader
        old_offset = self._reader.offset
        for event in self._reader.poll():
            self.history.add(event)
        self.bytes_read += self._reader.offset - old_offset
        return self.history


def read_head_and_tail(journal: Path, size: int) -> tuple[list[Event], int, int]:
    """Read the start event of the latest session and the latest events of a journal of `size` bytes.

    The tail is doubled until it contains one of `STATE_EVENTS`. Returns the events, the byte offset of the end of the
    last complete line, and the number of bytes that were parsed. Raises OSError.
    """
    with open_regular_file(journal) as file:
        length, parsed_bytes = INITIAL_TAIL_BYTES, 0
        while True:
            start = max(size - length, 0)
            file.seek(start)
            *lines, incomplete = file.read(size - start).split(b"\n")
            # The block may begin in the middle of a line.
            events = [event for line in lines[min(start, 1) :] if (event := from_line(line.decode(errors="replace")))]
            if start == 0:
                return events, size - len(incomplete), parsed_bytes + length
            parsed_bytes += length
            if any(isinstance(event, STATE_EVENTS) for event in events):
                # The first line of the tail, which is skipped, may begin at byte `start`.
                start_event = find_last_start(file, start + 1)
                return [start_event, *events] if start_event else events, size - len(incomplete), parsed_bytes
            length *= 2


def find_last_start(file: BinaryIO, end: int) -> Event | None:
    """Return the last `run_started` or `run_resumed` event that begins before byte `end`.

    Other events may precede `run_started`. The search compares bytes instead of parsing JSON: 0.8 s for 1 GB.
    """
    prefixes = [f'{{"type": "{event_type.type}"'.encode() for event_type in (RunStarted, RunResumed)]
    while end > 0:
        start = max(end - SCAN_BLOCK_BYTES, 0)
        file.seek(start)
        # A line that begins in this block may end in the next one.
        block = file.read(end - start + MAX_START_LINE_BYTES)
        position = max(block.rfind(prefix, 0, end - start + len(prefix) - 1) for prefix in prefixes)
        end = start + max(position, 0)
        if position >= 0 and (event := from_line(block[position:].split(b"\n", 1)[0].decode(errors="replace"))):
            return event
    return None
