"""Exit codes and signals of processes as text."""

from __future__ import annotations

import re
import signal
from pathlib import Path

REDUCE_MEMORY_ADVICE = "give fewer data.workers, a smaller data.prefetch or data.batch_size"


SHM_FULL_MESSAGE = (
    f"the shared memory (/dev/shm) is too small for the batches of the loader processes: {REDUCE_MEMORY_ADVICE}, or "
    "the container more of it (docker run --shm-size)"
)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int, *, oom_killed: bool | None = None) -> str:
    """How a process ended that told nothing itself; a negative code is a signal's number. `oom_killed` says whether
    the kernel ended a process for want of memory meanwhile, None where it does not tell."""
    if code >= 0:
        return f"it ended with exit code {code} and left no message but what the log holds"
    name = signal_name(-code)
    if name != "SIGKILL" or oom_killed is False:
        return f"it was killed by {name}"
    if oom_killed:
        return f"it was killed by {name}: the machine ran out of memory; {REDUCE_MEMORY_ADVICE}"
    return f"it was killed by {name}; if nobody did that, the machine ran out of memory"


def describe_loader_exit(code: int, oom_killed: bool | None) -> str:
    """Of a loader process, which the kernel ends by SIGBUS where the shared memory is full."""
    if code == -signal.SIGBUS:
        return f"it was killed by SIGBUS: {SHM_FULL_MESSAGE}"
    return describe_exit(code, oom_killed=oom_killed)


def oom_kill_count() -> int | None:
    """Processes that the kernel has ended for want of memory since the machine started, from /proc/vmstat; None where
    it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None
