"""Which processes belong to the run of a command, and signals to all of them.

Members are the descendants of the command, and the processes of this user with the marker of the run in the environment
that they were started with, such as what `srun` starts. A process below another marker belongs to that run: a run that
was started inside another one outlives it, see `leave_outer_run`.

Where this user can make one, a command also has a cgroup (cgroups(7), version 2). No process leaves it by a fork, a new
session or a new environment, and `cgroup.kill` ends all of its processes at once. It is below the cgroup of the run, so
the limits of a batch system or a container stay in force.

Imports little, because the keeper of a command uses it, too: see `engine.jobs.command.keeper`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from engine.base.process_table import ProcessId, is_own, live_processes, own_processes, read_proc

# The second one beside version 1.
ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
PREFIX = "gputrain-"
# The kernel counts an ended process as a member for an instant.
REMOVE_SECONDS = 0.5


def own_cgroup() -> str | None:
    """Return the folder of the cgroup of this process; None without cgroups of version 2."""
    _, _, rest = (b"\n" + read_proc("self", "cgroup")).partition(b"\n0::")
    folders = (root + os.fsdecode(rest.partition(b"\n")[0]).rstrip("/") for root in ROOTS)
    return next((folder for folder in folders if os.path.exists(f"{folder}/cgroup.procs")), None)  # noqa: PTH110


def make_cgroup(run_id: str) -> str | None:
    """Make the cgroup of a run and return its folder; None if this process cannot."""
    folder = own_cgroup()
    with suppress(OSError):
        if folder is not None:
            os.mkdir(path := f"{folder}/{PREFIX}{run_id}")  # noqa: PTH102
            return path
    return None


def enter_cgroup(path: str) -> None:
    """Move this process into a cgroup. Without the right to, it stays where it is."""
    _write(f"{path}/cgroup.procs", "0")


def leave_cgroup() -> None:
    """Move this process out of the cgroup of the run that it was started in, if any. Without the right to, it stays."""
    parent, _, name = (own_cgroup() or "").rpartition("/")
    if name.startswith(PREFIX):
        enter_cgroup(parent)


def kill_cgroup(path: str) -> None:
    """Kill all processes of a cgroup and of those below it, since Linux 5.14."""
    _write(f"{path}/cgroup.kill", "1")


def remove_cgroup(path: str) -> None:
    """Remove a cgroup that has no process any more."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            os.rmdir(path)  # noqa: PTH106
            return
        time.sleep(0.01)


def _write(path: str, text: str) -> None:
    with suppress(OSError), open(path, "w") as file:  # noqa: PTH123
        file.write(text)


MARKER = "GPUTRAIN_RUN_ID"
"""Environment variable with the unique ID of this start of the run."""
NO_RUN = "none"
"""The marker of a supervisor that was started inside a run."""
# A stopped process acts on no other signal before SIGCONT.
_NEEDS_NO_CONTINUE = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGCONT)


def find_members(run_id: str, root: int | None = None) -> list[ProcessId]:
    """Return the processes of a run that have not ended, without this one and `root`, the keeper of the command.

    Reads all of /proc, 20 to 50 us a process.
    """
    processes = live_processes()
    runs: dict[int, str | None] = {}

    def nearest_run(pid: int) -> str | None:
        if pid not in runs:
            runs[pid] = run_id if pid == root else run_of(pid)
            if runs[pid] is None and pid in processes:
                runs[pid] = nearest_run(processes[pid].parent)
        return runs[pid]

    skipped = (os.getpid(), root)
    members = [pid for pid in processes if pid not in skipped and nearest_run(pid) == run_id]
    return [ProcessId(pid, processes[pid].start_ticks) for pid in members]


def run_of(pid: int) -> str | None:
    """Return the ID of the run that a process of this user was started in, by its environment; None if unknown."""
    start = f"\0{MARKER}=".encode()
    _, found, value = (b"\0" + read_proc(pid, "environ")).partition(start)
    return os.fsdecode(value.partition(b"\0")[0]) if found and is_own(pid) else None


def leave_outer_run() -> None:
    """Start this program again outside the run whose command has started it, if any: its end must not end this one.

    /proc/PID/environ shows the environment that a program was started with, which it cannot change itself. A rank under
    torchrun belongs to the run of its torchrun.
    """
    if os.environ.get(MARKER, NO_RUN) == NO_RUN:
        return
    from engine.train.distributed.rank_env import detect_launcher

    if detect_launcher("auto", os.environ) == "spawn":
        leave_cgroup()
        os.environ[MARKER] = NO_RUN
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 (this program)


def signal_all(members: Iterable[ProcessId], number: int) -> None:
    """Send a signal to each of the processes that is still the same."""
    for member in members:
        if member.send_signal(number) and number not in _NEEDS_NO_CONTINUE:
            member.send_signal(signal.SIGCONT)


def kill_all(run_id: str, root: int | None, cgroup: str | None) -> list[ProcessId]:
    """Kill all members and return them. What has forked meanwhile is found by the next call."""
    if cgroup is not None:
        kill_cgroup(cgroup)
    members = find_members(run_id, root)
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
