"""`RUN/processes.json`: processes of a command that would be lost if its supervisor and its keeper were killed.

Neither a marker nor a cgroup identifies a process that was started with an empty environment where this user can make
no cgroup. It is known by its parents until the keeper is gone, and by its ID and start from then on. The file also has
what could not be killed at the end of the command. `engine.launch.survivors` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from engine.command.process_tree import CommandProcess
from engine.runs.folder import RunFolder
from engine.utils.codec import Count, FileRecord, Meta, Record, find_record, write_record
from engine.utils.process import boot_id
from engine.utils.process_table import ProcessId

MAX_PROCESSES = 1000
# A daemon is recorded soon after the start, and a long run is searched rarely.
MIN_SEARCH_SECONDS, MAX_SEARCH_SECONDS = 1.0, 10.0
# A search reads all of /proc, which takes a second on a host with 20,000 processes.
MAX_CPU_SHARE = 0.001


class RecordedProcess(Record, frozen=True, kw_only=True):
    """A process: its ID, and its start in clock ticks since the boot."""

    pid: Count
    start_ticks: Count


class RecordedProcesses(FileRecord, frozen=True, kw_only=True):
    """Processes of one start of a command."""

    boot_id: str
    """The boot of the kernel that counts their starts."""
    run_id: str
    """ID of the start of the run, as in its event `command_started`."""
    processes: Annotated[list[RecordedProcess], Meta(max_length=MAX_PROCESSES)]


class ProcessRecorder:
    """Keeps the file of a running command. Errors of the disk are ignored: the next call writes it again."""

    def __init__(self, path: Path, process: CommandProcess) -> None:
        self._path, self._process = path, process
        self._written: Sequence[ProcessId] = ()
        self._started_at = self._next_search = time.monotonic()
        with suppress(OSError):
            # That of an earlier start.
            path.unlink(missing_ok=True)

    def poll(self) -> None:
        """Search the processes of the command if it is time."""
        now = time.monotonic()
        if now < self._next_search or self._process.has_cgroup:
            return
        before = time.process_time()
        self._write(self._process.unmarked_members())
        cost_s = time.process_time() - before
        pause_s = min(max(now - self._started_at, MIN_SEARCH_SECONDS), MAX_SEARCH_SECONDS)
        self._next_search = now + max(pause_s, cost_s / MAX_CPU_SHARE)

    def close(self, left: Sequence[ProcessId]) -> None:
        """Record what is left at the end of the command."""
        self._write(left)

    def _write(self, processes: Sequence[ProcessId]) -> None:
        if processes == self._written:
            return
        with suppress(OSError):
            if processes:
                write_record(self._path, _record(self._process.run_id, processes), private=True)
            else:
                self._path.unlink(missing_ok=True)
            self._written = processes


def _record(run_id: str, processes: Iterable[ProcessId]) -> RecordedProcesses:
    entries = [RecordedProcess(pid=pid, start_ticks=start) for pid, start in processes][:MAX_PROCESSES]
    return RecordedProcesses(boot_id=boot_id(), run_id=run_id, processes=entries)


def recorded_processes(folder: RunFolder, run_id: str) -> list[ProcessId]:
    """Return the recorded processes of a start of a run, which may have ended. The folder is that of this user."""
    record = find_record(folder.processes, RecordedProcesses)
    if record is None or (record.boot_id, record.run_id) != (boot_id(), run_id):
        return []
    return [ProcessId(process.pid, process.start_ticks) for process in record.processes]
