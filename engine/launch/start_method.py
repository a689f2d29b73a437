"""Decide how a process starts ranks: fork only where a fork is safe, else spawn.

`rank_starter` asks right before it starts the ranks, because user code or an environment variable can start threads in
any process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from engine.training.job import StartMethod
from engine.utils.errors import UsageError

# Files that a process opens when it initializes CUDA, CUDA in WSL, or ROCm.
_GPU_FILES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")


def choose_start_method(requested: Literal["auto", "spawn", "fork"]) -> StartMethod:
    """Return how this process must start ranks for `device.start_method`.

    Raises UsageError if fork is requested but not safe."""
    if requested == "spawn":
        return "spawn"
    obstacle = find_fork_obstacle()
    if obstacle is None:
        return "fork"
    if requested == "auto":
        return "spawn"
    reason = f"the ranks cannot be forked, because the process that starts them {obstacle}"
    raise UsageError.one("device.start_method", reason, "use auto or spawn", code="not-supported")


def find_fork_obstacle() -> str | None:
    """Return why this process must not fork ranks, as a predicate; None if a fork is safe.

    A forked child has none of the threads, but all locks that they held. CUDA does not work in a child of a process
    that has initialized it; every library that does so opens files of the driver."""
    import torch

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"has {threads} threads"
    if torch.cuda.is_initialized() or any(target.startswith(_GPU_FILES) for target in _open_files()):
        return "uses a GPU"
    return None


def _open_files() -> list[str]:
    """Return the targets of all file descriptors of this process."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(link.readlink()))
        except FileNotFoundError:
            # The descriptor through which this folder is read.
            continue
    return targets
