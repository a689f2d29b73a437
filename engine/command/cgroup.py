"""A cgroup of its own for a command (cgroups(7), version 2), where this user can make one.

No process leaves it by a fork, a new session or a new environment, and `cgroup.kill` ends all of its processes at once.
It is below the cgroup of the run, so the limits of a batch system or a container stay in force.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from engine.utils.process_table import read_proc

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
