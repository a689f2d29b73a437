"""The processes that write the files of runs: while one has a file open, its end tells the end of the run.

Most trainers keep an event file or a database open. A file that is opened for each row has no writer here.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from pathlib import Path

from engine.foreign.process import ProcessId, open_files, own_processes


class Writers:
    """The processes of this user that had files of runs open for writing, and when they were missed."""

    def __init__(self) -> None:
        self._writers: dict[Path, ProcessId] = {}
        self._ended_at: dict[Path, float] = {}

    def look(self, wanted: Container[Path]) -> None:
        """Find the writers of the `wanted` files, and those that have ended. 100 processes take 10 ms."""
        for path, process in list(self._writers.items()):
            if not process.is_running():
                self._ended_at[path] = time.time()
                del self._writers[path]
        for process in own_processes():
            for file in open_files(process.pid) or ():
                if file.path in wanted:
                    self._writers[file.path] = process
                    self._ended_at.pop(file.path, None)

    def ended_at(self, paths: Iterable[Path]) -> float | None:
        """Return when the last writer of these files was missed; None if there was none, or if one is left."""
        ended = None
        for path in paths:
            if path in self._writers:
                return None
            if path in self._ended_at:
                ended = max(ended or 0.0, self._ended_at[path])
        return ended
