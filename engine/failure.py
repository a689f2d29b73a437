"""What ended a rank, in one sentence, and which of several failures was the cause of the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from engine.events import RankFailed

# What a rank meets when another one is gone.
_LOST_PEER = re.compile(
    r"connection (reset|closed|refused)|broken pipe|gloo|nccl|socket|DistBackendError|DistNetworkError|timed out", re.I
)


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
    return f"{name}: {text}" if text else name


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_in_words(code: int) -> str:
    """How a process ended that told nothing itself; a negative code is a signal's number."""
    if code >= 0:
        return f"it ended with exit code {code} and left no message but what the log holds"
    name = signal_name(-code)
    hint = "; if nobody did that, the machine ran out of memory" if name == "SIGKILL" else ""
    return f"it was killed by {name}{hint}"


def failure_in_words(failure: RankFailed) -> str:
    return f"rank {failure.rank} ({failure.device}) failed: {failure.cause}"


def root_cause(failures: Sequence[RankFailed]) -> RankFailed:
    """The failure that came of itself, rather than of another rank's; the earliest of those."""
    return min(failures, key=lambda failure: (bool(_LOST_PEER.search(failure.cause)), failure.time))
