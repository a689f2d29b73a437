"""`RUN/processes.json`: processes of a command that would be lost if its supervisor and its keeper were killed.

Neither a marker nor a cgroup identifies a process that was started with an empty environment where this user can make
no cgroup. It is known by its parents until the keeper is gone, and by its ID and start from then on. The file also has
what could not be killed at the end of the command. `engine.launch.survivors` reads it.

Its processes are killed on request, and a run folder may come from somebody else, who could name any process of this
user in it. So the file has a digest that only this user can make.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from engine.command.membership import find_members
from engine.command.process_tree import CommandProcess
from engine.command.user_key import is_digest_of, keyed_digest
from engine.runs.folder import RunFolder
from engine.utils.codec import Count, FileRecord, Meta, Record, find_record, replace, write_record
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
    start_ticks: Count
    """Start of the command in clock ticks since the boot: none of its processes is older."""
    processes: Annotated[list[RecordedProcess], Meta(max_length=MAX_PROCESSES)]
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}\Z")] = ""
    """Keyed digest of the other fields, see `engine.command.user_key`."""

    def signed(self) -> RecordedProcesses:
        """Return the record with its digest. Raises OSError if the key of this user cannot be written."""
        return replace(self, digest=keyed_digest(self._signed_value()))

    @property
    def is_authentic(self) -> bool:
        """Whether this user has signed the record."""
        return is_digest_of(self.digest, self._signed_value())

    def _signed_value(self) -> tuple[str, RecordedProcesses]:
        # The name tells it from other values that have digests with the same key.
        return "processes", replace(self, digest="")


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
                write_record(self._path, _record(self._process, processes).signed(), private=True)
            else:
                self._path.unlink(missing_ok=True)
            self._written = processes


def _record(command: CommandProcess, processes: Sequence[ProcessId]) -> RecordedProcesses:
    entries = [RecordedProcess(pid=pid, start_ticks=start) for pid, start in processes[:MAX_PROCESSES]]
    return RecordedProcesses(
        boot_id=boot_id(), run_id=command.run_id, start_ticks=command.start_ticks, processes=entries
    )


def recorded_processes(folder: RunFolder, run_id: str) -> list[ProcessId]:
    """Return the recorded processes of a start of a run, which may have ended; none that this user has not recorded."""
    record = find_record(folder.processes, RecordedProcesses)
    if record is None or (record.boot_id, record.run_id) != (boot_id(), run_id) or not record.is_authentic:
        return []
    recorded = [ProcessId(process.pid, process.start_ticks) for process in record.processes]
    return [process for process in recorded if process.start_ticks >= record.start_ticks]


def left_processes(folder: RunFolder, run_id: str) -> list[ProcessId]:
    """Return the processes of a start of a run whose supervisor has ended. The folder is that of this user."""
    # Zeros replace the marker of a supervisor inside another run, which is no process of any run.
    return find_members(run_id, recorded=recorded_processes(folder, run_id)) if run_id.strip("0") else []
