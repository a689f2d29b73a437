"""The processes that write the files of runs: while one has a file open, its end tells the end of the run.

Most trainers keep an event file or a database open. A file that is opened for each row has no writer here.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from pathlib import Path

from engine.foreign.process import open_files
from engine.utils.process_table import ProcessId, own_processes

# Looking takes longer on a host with thousands of processes.
LOOK_SECONDS, LOOK_SHARE = 3.0, 0.02


class Writers:
    """The processes of this user that had files of runs open for writing, and when they were missed."""

    def __init__(self) -> None:
        self._writers: dict[Path, ProcessId] = {}
        self._ended_at: dict[Path, float] = {}
        self._next_look = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() >= self._next_look

    def look(self, wanted: Container[Path]) -> None:
        """Find the writers of the `wanted` files, and those that have ended. 100 processes take 10 ms.

        Files with a known writer are looked for, too: a worker that inherited the file may end before its trainer.
        """
        began = time.monotonic()
        found: dict[Path, ProcessId] = {}
        for process in own_processes():
            for file in open_files(process.pid) or ():
                if file.path in wanted or file.path in self._writers:
                    # The workers of a data loader inherit the files of the process that started them.
                    found[file.path] = min(found.get(file.path, process), process, key=_start)
                    self._ended_at.pop(file.path, None)
        for path, process in self._writers.items():
            if path not in found:
                if process.is_running():
                    found[path] = process
                else:
                    self._ended_at[path] = time.time()
        self._writers = found
        took = time.monotonic() - began
        self._next_look = time.monotonic() + max(LOOK_SECONDS, took / LOOK_SHARE)

    def keep(self, paths: Container[Path]) -> None:
        """Forget all files but these."""
        self._writers = {path: process for path, process in self._writers.items() if path in paths}
        self._ended_at = {path: ended for path, ended in self._ended_at.items() if path in paths}

    def writer_of(self, paths: Iterable[Path]) -> ProcessId | None:
        """Return the process that has one of these files open, the one that started first; None without one."""
        found = (self._writers[path] for path in paths if path in self._writers)
        return min(found, key=_start, default=None)

    def ended_at(self, paths: Iterable[Path]) -> float | None:
        """Return when the last writer of these files was missed; None if there was none, or if one is left."""
        ended = None
        for path in paths:
            if path in self._writers:
                return None
            if path in self._ended_at:
                ended = max(ended or 0.0, self._ended_at[path])
        return ended


def _start(process: ProcessId) -> tuple[int, int]:
    return process.start_ticks, process.pid
