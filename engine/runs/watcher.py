"""A run's newest state, again and again, at the price of what came since: of a long journal only its two ends are
read."""

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

# A journal up to this size, in bytes, is read as a whole.
MAX_FULL_READ_BYTES = 1 << 20
INITIAL_TAIL_BYTES = 1 << 18
HEAD_BYTES = 1 << 16
SCAN_BLOCK_BYTES = 1 << 20
# Each says whether a run trains, holds or has ended.
STATE_EVENTS = (RunStarted, StepEvent, EpochEvent, RunPaused, RunContinued, RunFinished)


class RunWatcher:
    """The newest state of one run. Of a long journal `history` knows the first event and the latest ones: its best and
    its number of epochs are then those of `summary.json`."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._reset()

    def _reset(self) -> None:
        self.history = History()
        self.partial = False
        """Of the journal only the ends were read."""
        self._reader: JournalReader | None = None

    def poll(self) -> History:
        """What the run has come to by now. Begins anew where the journal was taken away or became shorter."""
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
                    events, reader.offset, read = read_head_and_tail(journal, size)
                except OSError:
                    return self.history
                self.partial = True
                self.bytes_read += read
                for event in events:
                    self.history.add(event)
            self._reader = reader
        before = self._reader.offset
        for event in self._reader.poll():
            self.history.add(event)
        self.bytes_read += self._reader.offset - before
        return self.history


def read_head_and_tail(journal: Path, size: int) -> tuple[list[Event], int, int]:
    """How the latest session of a journal of this many bytes began, and its latest events, from one on that tells the
    state; where the last whole line ends, and how many bytes were read as lines for it."""
    with open_regular_file(journal) as file:
        first = from_line(file.readline(HEAD_BYTES).decode(errors="replace"))
        length, read = INITIAL_TAIL_BYTES, HEAD_BYTES
        while True:
            start = max(size - length, 0)
            file.seek(start)
            *lines, torn = file.read(size - start).split(b"\n")
            # What the block begins with may be the rest of a line.
            events = [event for line in lines[min(start, 1) :] if (event := from_line(line.decode(errors="replace")))]
            if start == 0:
                return events, size - len(torn), read + length
            if any(isinstance(event, STATE_EVENTS) for event in events):
                begun = find_last_resume(file, start) or first
                return [begun, *events] if begun else events, size - len(torn), read + length
            read += length
            length *= 2


def find_last_resume(file: BinaryIO, end: int) -> Event | None:
    """The last `run_resumed` that begins before this place; looked for as bytes, which takes half a second
    for a gigabyte."""
    mark = f'{{"type": "{RunResumed.type}"'.encode()
    while end > 0:
        start = max(end - SCAN_BLOCK_BYTES, 0)
        file.seek(start)
        # A line that begins in this block may run on into the one behind it.
        block = file.read(end - start + HEAD_BYTES)
        place = block.rfind(mark, 0, end - start + len(mark))
        if place >= 0:
            return from_line(block[place:].split(b"\n", 1)[0].decode(errors="replace"))
        end = start
    return None
