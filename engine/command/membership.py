"""Which processes belong to the run of a command, and signals to all of them.

Members are the descendants of the command, and the processes of this user with the marker of the run in the environment
that they were started with, or in its cgroup. Nothing else is a member: no name and no process group of others counts.
A run that was started inside another one is no member of that, see `leave_outer_run`.

So whoever starts a process with the marker puts it into the run, as `srun` and `systemd-run` do for a command. A person
who copies the environment of the command into a shell, to debug it, does not mean that: what has been started on a
terminal is no member, unless it descends from the command. The command itself has no controlling terminal.

Imports little, because the keeper of a command uses it, too: see `engine.command.keeper`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress

from engine.command.cgroup import cgroup_pids, kill_cgroup, leave_cgroup, run_of_cgroup
from engine.utils.process_table import (
    ProcessId,
    ProcessStat,
    children_by_parent,
    is_own,
    live_processes,
    own_processes,
    read_proc,
    read_stat,
)

MARKER = "GPUTRAIN_RUN_ID"
"""Environment variable with the unique ID of this start of the run."""
MAX_STOP_ROUNDS = 10
# A stopped process acts on no other signal before SIGCONT.
_NEEDS_NO_CONTINUE = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGCONT)


def find_members(run_id: str, root: int | None = None) -> list[ProcessId]:
    """Return the processes of a run that have not ended, without this one and `root`.

    The descendants of `root`, the keeper of the command, are members. After its death, only marked processes and their
    descendants are found. Reads all of /proc, 20 to 50 us a process; see `is_member` for a single one.
    """
    processes = live_processes()
    children = children_by_parent(processes)
    skipped = {os.getpid(), root}
    members: dict[int, None] = {}
    inner: set[int] = set()

    def add_descendants(parent: int, *, is_inner: bool = False) -> None:
        pending = [(parent, is_inner)]
        while pending:
            pid, is_inner = pending.pop()
            for child in children.get(pid, ()):
                if child in skipped or child in members or child in inner:
                    continue
                in_other_run = is_inner or run_of(child) not in (None, run_id)
                inner.add(child) if in_other_run else members.setdefault(child)
                pending.append((child, in_other_run))

    if root is not None:
        add_descendants(root)
    for pid in processes:
        is_new = pid not in skipped and pid not in members and pid not in inner
        if is_new and is_own(pid) and run_of(pid) == run_id and not _was_typed(pid, run_id, processes):
            members[pid] = None
            add_descendants(pid)
    return [ProcessId(pid, processes[pid].start_ticks) for pid in members]


def _was_typed(pid: int, run_id: str, processes: Mapping[int, ProcessStat]) -> bool:
    """Whether the oldest marked process among a process and its ancestors has a controlling terminal."""
    first, ancestors = pid, set[int]()
    while pid in processes and pid not in ancestors:
        ancestors.add(pid)
        if run_of(pid) == run_id:
            first = pid
        pid = processes[pid].parent
    return processes[first].terminal != 0


def is_member(pid: int, run_id: str, root: int | None) -> bool:
    """Whether a process belongs to a run, as in `find_members`."""
    ancestors: dict[int, ProcessStat] = {}
    start = pid
    while pid not in ancestors and pid != root and (status := read_stat(pid)) is not None:
        ancestors[pid] = status
        pid = status.parent
    runs = (run_of(ancestor) for ancestor in ancestors)
    nearest = next((run for run in runs if run is not None), None)
    if nearest is None or pid == root:
        return pid == root and nearest in (None, run_id)
    return nearest == run_id and is_own(start) and not _was_typed(start, run_id, ancestors)


def run_of(pid: int) -> str | None:
    """Return the ID of the run that a process was started in, by its environment or else its cgroup; None if unknown.

    Other users' environments are not readable, except for root.
    """
    start = f"\0{MARKER}=".encode()
    _, found, value = (b"\0" + read_proc(pid, "environ")).partition(start)
    return os.fsdecode(value.partition(b"\0")[0]) if found else run_of_cgroup(pid)


def leave_outer_run() -> None:
    """Make this process, and what it starts from now on, no member of the run that it was started in, if any.

    A supervisor calls it first: the end of the outer run must not end an inner one. A rank under torchrun does not,
    because it belongs to the run of its torchrun.
    """
    outer = os.environb.get(MARKER.encode())
    if not outer:
        return
    leave_cgroup()
    none = b"0" * len(outer)
    os.environb[MARKER.encode()] = none
    # /proc/PID/environ shows the memory of the initial environment, which setenv(3) does not change.
    entry = b"%s=%s" % (MARKER.encode(), outer)
    offset = (b"\0" + read_proc("self", "environ")).find(b"\0%s\0" % entry)
    with suppress(OSError, ValueError, IndexError):
        # The field `env_start` of proc_pid_stat(5). The name of the command may contain any character.
        start = int(read_proc("self", "stat").rpartition(b")")[2].split()[47])
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            if offset >= 0 and os.pread(memory, len(entry), start + offset) == entry:
                os.pwrite(memory, none, start + offset + len(entry) - len(outer))
        finally:
            os.close(memory)


def signal_all(members: Iterable[ProcessId], number: int) -> None:
    """Send a signal to each of the processes that is still the same."""
    for member in members:
        if member.send_signal(number) and number not in _NEEDS_NO_CONTINUE:
            member.send_signal(signal.SIGCONT)


def kill_all(run_id: str, root: int | None, cgroup: str | None) -> set[ProcessId]:
    """Kill all members and return them. What has forked meanwhile is found by the next call."""
    # A fork cannot escape the kill of a cgroup. An inner run may be in it, too.
    if cgroup is not None and all(run_of(pid) in (None, run_id) for pid in cgroup_pids(cgroup)):
        kill_cgroup(cgroup)
    # Without it: a stopped process cannot start another one in place of those that are killed.
    members: set[ProcessId] = set()
    for _ in range(MAX_STOP_ROUNDS):
        started = [member for member in find_members(run_id, root) if member not in members]
        if not started:
            break
        signal_all(started, signal.SIGSTOP)
        members.update(started)
    signal_all(members, signal.SIGKILL)
    return members


def processes_by_run() -> dict[str, list[ProcessId]]:
    """Return the marked processes of this user by the ID of their run, for a list of runs. Reads /proc once."""
    found: dict[str, list[ProcessId]] = {}
    for process in own_processes():
        run = run_of(process.pid)
        if run is not None and process.pid != os.getpid() and process.is_running():
            found.setdefault(run, []).append(process)
    return found
