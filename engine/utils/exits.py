"""Exit codes and signals of processes as text."""

from __future__ import annotations

import re
import signal
from pathlib import Path

LESS_MEMORY = "give fewer data.workers, a smaller data.prefetch or data.batch_size"


SHARED_MEMORY_FULL = (
    f"the shared memory (/dev/shm) is too small for the batches of the loader processes: {LESS_MEMORY}, or the "
    "container more of it (docker run --shm-size)"
)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_in_words(code: int, *, out_of_memory: bool | None = None) -> str:
    """How a process ended that told nothing itself; a negative code is a signal's number. `out_of_memory` says whether
    the kernel ended a process for want of memory meanwhile, None where it does not tell."""
    if code >= 0:
        return f"it ended with exit code {code} and left no message but what the log holds"
    name = signal_name(-code)
    if name != "SIGKILL" or out_of_memory is False:
        return f"it was killed by {name}"
    if out_of_memory:
        return f"it was killed by {name}: the machine ran out of memory; {LESS_MEMORY}"
    return f"it was killed by {name}; if nobody did that, the machine ran out of memory"


def loader_exit_in_words(code: int, out_of_memory: bool | None) -> str:
    """Of a loader process, which the kernel ends by SIGBUS where the shared memory is full."""
    if code == -signal.SIGBUS:
        return f"it was killed by SIGBUS: {SHARED_MEMORY_FULL}"
    return exit_in_words(code, out_of_memory=out_of_memory)


def oom_kills() -> int | None:
    """Processes that the kernel has ended for want of memory since the machine started, from /proc/vmstat; None where
    it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None
