"""What ended a rank, in one sentence, and which of several failures was the cause of the others."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path

from engine.events import RankFailed

# What a rank meets when another one is gone.
_LOST_PEER = re.compile(r"connection (reset|closed|refused|to another)|broken pipe|gloo|nccl|socket|timed out", re.I)


class NoLastCheckpointError(Exception):
    """All epochs are done, and what came of them could not be written; the text says why."""


LESS_MEMORY = "give fewer data.workers, a smaller data.prefetch or data.batch_size"
SHARED_MEMORY_FULL = (
    f"the shared memory (/dev/shm) is too small for the batches of the loader processes: {LESS_MEMORY}, or the "
    "container more of it (docker run --shm-size)"
)


class NonFiniteLossError(Exception):
    """A loss or a gradient is NaN or infinite; the text says where."""


def cause_of(error: BaseException) -> str:
    """An exception in one sentence. One that a loader process met has its own text behind a traceback, on the last
    line."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[-1] if lines[0].startswith("Caught ") else lines[0]) if lines else ""
    if name == "OutOfMemoryError":
        return f"the GPU's memory is full: give a smaller data.batch_size ({text})"
    if type(error).__module__.startswith("engine."):
        return re.sub(r"^engine\.[\w.]+: ", "", text)
    if name in ("RuntimeError", "DistBackendError", "DistNetworkError") and _LOST_PEER.search(text):
        return f"it lost the connection to another rank ({text})"
    return f"{name}: {text}" if text else name


def failure_of(rank: int, device: str, error: BaseException) -> RankFailed:
    """Of the error that is being handled."""
    return RankFailed(
        rank=rank,
        device=device,
        cause=cause_of(error),
        traceback=traceback.format_exc(),
        repeats=isinstance(error, NonFiniteLossError | NoLastCheckpointError),
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


def failure_in_words(failure: RankFailed) -> str:
    return f"rank {failure.rank} ({failure.device}) failed: {failure.cause}"


def root_cause(failures: Sequence[RankFailed]) -> RankFailed:
    """The failure that came of itself, rather than of another rank's; the earliest of those."""
    return min(failures, key=lambda failure: (bool(_LOST_PEER.search(failure.cause)), failure.time))
