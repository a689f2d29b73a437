"""Describe how a process ended, from its exit code or signal.

`engine.jobs.launch.ranks` uses it for ranks, `engine.train.data` for DataLoader workers.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

from engine.base.errors import Problem
from engine.base.files import read_text


def reduce_memory_advice(*, threaded: bool) -> str:
    """Return which keys reduce the memory of the loaders of a rank. The number of decode threads does not change it."""
    return f"reduce {'' if threaded else 'data.workers, '}data.prefetch or data.batch_size"


def signal_name(number: int) -> str:
    """Return the name of a signal, like SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_status(code: int) -> str:
    """Return "was killed by SIGKILL" or "ended with exit code 4". A negative code is a signal number."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def describe_exit(code: int, *, oom_killed: bool | None = None, threaded: bool = False) -> Problem:
    """Describe the end of a process without an error message of its own. A negative code is a signal number.

    `oom_killed` is whether the kernel's OOM killer killed a process meanwhile; None if that is unknown. `threaded` is
    whether decode threads load the images of the run, not DataLoader workers.
    """
    status = f"it {exit_status(code)}"
    if code >= 0:
        return Problem("", f"{status} and reported no error", "the log may contain the cause", code="process-failed")
    if code != -signal.SIGKILL or oom_killed is False:
        return Problem("", status, code="process-killed")
    advice = reduce_memory_advice(threaded=threaded)
    if oom_killed:
        return Problem("", f"{status}: the host ran out of memory", advice, code="out-of-memory")
    advice = f"if no user did that, the host ran out of memory: {advice}"
    return Problem("", status, advice, code="process-killed")


def describe_loader_exit(code: int, *, oom_killed: bool | None, threaded: bool) -> Problem:
    """Describe how a loader process ended. The kernel kills it with SIGBUS when the shared memory is full."""
    if code != -signal.SIGBUS:
        return describe_exit(code, oom_killed=oom_killed, threaded=threaded)
    reason = (
        f"it {exit_status(code)}: the shared memory (/dev/shm) is too small for the batches of the "
        f"{'decode threads' if threaded else 'DataLoader workers'}: {reduce_memory_advice(threaded=threaded)}, or "
        "increase the shared memory (docker run --shm-size)"
    )
    return Problem("", reason, code="shm-full")


def oom_kill_count() -> int | None:
    """Return the number of processes that the OOM killer has killed since boot (`oom_kill` in /proc/vmstat); None if
    unknown."""
    match = re.search(r"^oom_kill (\d+)$", read_text(Path("/proc/vmstat")), re.M)
    return int(match[1]) if match else None
