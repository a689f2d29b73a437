"""The processes of this host as /proc shows them: identity, parent, state, and signals that reach no other process.

Imports little, because the process that holds a command in memory for days uses it, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

READ_BYTES = 1 << 16
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessId(NamedTuple):
    """A process: its ID, and its start in clock ticks since the boot. IDs are reused."""

    pid: int
    start_ticks: int

    @classmethod
    def find(cls, pid: int) -> ProcessId | None:
        """Return the process that has this ID now; None if none has."""
        status = read_stat(pid)
        return None if status is None else cls(pid, status.start_ticks)

    def is_running(self) -> bool:
        """Whether it has not ended."""
        status = read_stat(self.pid)
        return status is not None and status.start_ticks == self.start_ticks and status.is_alive

    def send_signal(self, number: int) -> bool:
        """Send a signal to this process; False if it has ended, or if this user may not send it signals."""
        try:
            if ProcessId.find(self.pid) != self:
                return False
            os.kill(self.pid, number)
        except OSError:
            return False
        return True


class ProcessStat(NamedTuple):
    """Fields of proc_pid_stat(5)."""

    name: str
    state: str
    parent: int
    group: int
    cpu_seconds: float
    start_ticks: int
    memory_bytes: int

    @property
    def is_alive(self) -> bool:
        """Whether it is more than an exit code that waits for the parent."""
        return self.state not in "ZX"


def read_proc(pid: int | str, name: str) -> bytes:
    """Return a file of a process; empty if it has ended or does not show it to this user.

    A file object takes twice the time, and a host has thousands of processes.
    """
    data = b""
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return data
    try:
        while part := os.read(descriptor, READ_BYTES):
            data += part
    except OSError:
        # It has ended meanwhile.
        return data
    finally:
        os.close(descriptor)
    return data


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if there is none with this ID."""
    data = read_proc(pid, "stat")
    try:
        # The name of the command, in parentheses, may contain any character.
        name, _, rest = data.partition(b"(")[2].rpartition(b")")
        parts = rest.split()
        return ProcessStat(
            name.decode(errors="replace"),
            parts[0].decode(),
            int(parts[1]),
            int(parts[2]),
            (int(parts[11]) + int(parts[12])) / TICKS_PER_SECOND,
            int(parts[19]),
            int(parts[21]) * _PAGE_BYTES,
        )
    except (ValueError, IndexError):
        return None


def live_processes() -> dict[int, ProcessStat]:
    """Return all processes that have not ended, by ID."""
    return {pid: status for pid in all_pids() if (status := read_stat(pid)) is not None and status.is_alive}


def children_by_parent(processes: dict[int, ProcessStat]) -> dict[int, list[int]]:
    """Return the IDs of the children of each process."""
    children: dict[int, list[int]] = {}
    for pid, status in processes.items():
        children.setdefault(status.parent, []).append(pid)
    return children


def is_own(pid: int) -> bool:
    """Whether a process belongs to this user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()  # noqa: PTH116
    except OSError:
        return False


def own_processes() -> Iterator[ProcessId]:
    """Yield the processes of this user."""
    for pid in all_pids():
        if is_own(pid) and (process := ProcessId.find(pid)) is not None:
            yield process


def all_pids() -> list[int]:
    """Return the IDs of all processes that /proc shows."""
    try:
        return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    except OSError:
        return []
