"""Follow a growing journal: decide what to read of it, and notice that it was replaced.

`engine.runs.journal` reads the lines. `engine.runs.journal_source` makes points of the events.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from engine.runs.events import Event
from engine.runs.journal import READ_CHUNK_BYTES, JournalReader

# With `kinds`, the follower reads every event in the last `TAIL_BYTES`. In the `MAX_SCANNED_BYTES` before them it reads
# the events of `kinds` only, and it skips everything older.
# Finding them in `MAX_SCANNED_BYTES` takes a fifth of a second.
TAIL_BYTES = 1 << 16
MAX_SCANNED_BYTES = 1 << 26


class JournalFollower(JournalReader):
    """Reads what is appended to a journal. It starts over when the journal shrinks or another file has its name.

    A journal that is missing or unreadable keeps the events that were read. At most one chunk is in memory.
    """

    def __init__(self, path: Path, kinds: tuple[type[Event], ...] = ()) -> None:
        """With `kinds`, the first reading of a long journal skips other events, except at its end."""
        super().__init__(path)
        self._kinds = kinds
        self._inode = self._size = self._tail_start = 0

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that `look` found and `read` has not read."""
        return max(self._size - self.offset, 0)

    def look(self) -> bool:
        """Find out how much can be read. Return whether the journal was replaced, which voids its earlier events."""
        try:
            status = self._path.lstat()
        except OSError:
            self._size = self.offset
            return False
        if not stat.S_ISREG(status.st_mode):
            # The reader refuses it, and says why.
            self._size = self.offset
            return False
        was_replaced = self.offset > 0 and (status.st_size < self.offset or status.st_ino != self._inode)
        if was_replaced:
            self.restart()
        self._inode, self._size = status.st_ino, status.st_size
        if self._kinds and self.offset == 0:
            self._tail_start = self._size - TAIL_BYTES
            self.offset = max(self._size - MAX_SCANNED_BYTES, 0)
        return was_replaced

    def events(self) -> Iterator[Event]:
        """Yield all unread events that the journal has now."""
        self.look()
        # The first reading tells why nothing can be read.
        yield from self.read(READ_CHUNK_BYTES)
        while self.unread_bytes:
            yield from self.read(READ_CHUNK_BYTES)

    def read(self, max_bytes: int) -> list[Event]:
        """Return the unread events of the next `max_bytes` bytes."""
        start, before_tail = self.offset, self._tail_start - self.offset
        if before_tail > 0:
            events = list(self.poll(min(before_tail, max_bytes), self._kinds))
        else:
            events = list(self.poll(max_bytes))
        if self.offset == start:
            # The journal is gone, or cannot be read.
            self._size = start
        return events
