"""A cgroup of its own for a command (cgroups(7), version 2), where this user can make one.

No process leaves it by a fork, a new session or a new environment, and `cgroup.kill` ends all of its processes at once.
It is below the cgroup of the run, so the limits of a batch system or a container stay in force.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

from engine.utils.process_table import read_proc

PREFIX = "gputrain-"
# The kernel counts an ended process as a member for an instant.
REMOVE_SECONDS = 0.5
ABANDONED_SECONDS = 60.0


def own_cgroup() -> str | None:
    """Return the folder of the cgroup of this process; None without cgroups of version 2."""
    path = path_of("self")
    if path is None or path.startswith("/.."):
        return None
    for line in os.fsdecode(read_proc("self", "mountinfo")).splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.startswith("cgroup2 "):
            root, mount = fields.split()[3:5]
            root = "" if root == "/" else root
            if path == root or path.startswith(f"{root}/"):
                return os.path.normpath(mount + path[len(root) :])
    return None


def path_of(pid: int | str) -> str | None:
    """Return the path of the cgroup of a process below the root of all cgroups; None if it is unknown."""
    _, found, rest = (b"\n" + read_proc(pid, "cgroup")).partition(b"\n0::")
    return os.fsdecode(rest.partition(b"\n")[0]) if found else None


def run_of_cgroup(pid: int) -> str | None:
    """Return the ID of the run whose cgroup a process is in; None if it is in none."""
    # A run that was started inside another one has its cgroup below.
    for name in reversed((path_of(pid) or "").split("/")):
        if name.startswith(PREFIX):
            return name.removeprefix(PREFIX).removesuffix(".scope")
    return None


def needs_scope() -> bool:
    """Whether this process is in a login session, where no user can make a cgroup.

    Never in the job of a batch system: a scope of systemd would take the command out of its limits.
    """
    folder = own_cgroup()
    in_session = (path_of("self") or "").startswith("/user.slice/")
    return in_session and folder is not None and not os.access(f"{folder}/cgroup.procs", os.W_OK)


def make_cgroup(run_id: str) -> str | None:
    """Make the cgroup of a run and return its folder; None if this process cannot."""
    folder = own_cgroup()
    if folder is None:
        return None
    _remove_abandoned(folder)
    path = f"{folder}/{PREFIX}{run_id}"
    with suppress(OSError):
        os.mkdir(path)  # noqa: PTH102
        return path
    return None


def _remove_abandoned(folder: str) -> None:
    """Remove the empty cgroups of runs whose processes were all killed at the same time."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            # A new one is empty until its command enters it.
            if entry.name.startswith(PREFIX) and time.time() - entry.stat().st_mtime > ABANDONED_SECONDS:
                with suppress(OSError):
                    os.rmdir(entry.path)  # noqa: PTH106


def enter_cgroup(path: str) -> None:
    """Move this process into a cgroup. Without the right to, it stays where it is."""
    _write(f"{path}/cgroup.procs", "0")


def leave_cgroup() -> None:
    """Move this process out of the cgroup of the run that it was started in, if any. Without the right to, it stays."""
    folder = own_cgroup() or ""
    parent = folder
    while (name := os.path.basename(parent)).startswith(PREFIX) and not name.endswith(".scope"):  # noqa: PTH119
        parent = os.path.dirname(parent)  # noqa: PTH120
    if parent != folder:
        enter_cgroup(parent)


def kill_cgroup(path: str) -> bool:
    """Kill all processes of a cgroup and of those below it; False before Linux 5.14."""
    return _write(f"{path}/cgroup.kill", "1")


def cgroup_pids(path: str) -> Iterator[int]:
    """Yield the IDs of the processes of a cgroup and of those below it."""
    for folder, _, _ in os.walk(path):
        with suppress(OSError), open(f"{folder}/cgroup.procs") as file:  # noqa: PTH123
            yield from map(int, file.read().split())


def remove_cgroup(path: str) -> None:
    """Remove a cgroup that has no process any more, and those that its processes made below."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        for folder, _, _ in os.walk(path, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106
        if not os.path.isdir(path) or time.monotonic() > deadline:  # noqa: PTH112
            return
        time.sleep(0.01)


def _write(path: str, text: str) -> bool:
    try:
        with open(path, "w") as file:  # noqa: PTH123
            file.write(text)
    except OSError:
        return False
    return True
