"""The processes of this user that write files: what tells a run of one command from that of another one beside it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from engine.base.process_table import ProcessId, own_processes
from engine.watch.process import open_files


class Writers:
    """The processes that were seen to have files open for writing, as long as they run.

    Most trainers keep an event file or a database open. A file that is opened for each row is rarely seen.
    """

    def __init__(self) -> None:
        self._writers: dict[Path, ProcessId] = {}

    def writer_of(self, paths: Collection[Path]) -> ProcessId | None:
        """Return the process that has or had one of these files open, the one that started first; None without one.

        100 processes take 10 ms.
        """
        self._writers = {path: process for path, process in self._writers.items() if process.is_running()}
        for process in own_processes():
            for file in open_files(process.pid) or ():
                if file.path in paths:
                    # The workers of a data loader inherit the files of the process that started them.
                    self._writers[file.path] = min(self._writers.get(file.path, process), process, key=_start)
        return min((self._writers[path] for path in paths if path in self._writers), key=_start, default=None)


def _start(process: ProcessId) -> tuple[int, int]:
    return process.start_ticks, process.pid
