"""The resources of this host: CPU cores, free memory and disk, open-file limit; bytes as text."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")


def free_memory() -> tuple[int, int]:
    """What this process may still take, and could have at most: the control group's limit counts."""
    host = psutil.virtual_memory()
    free, total = int(host.available), int(host.total)
    with suppress(OSError, ValueError, KeyError):
        limit = int((CGROUP_ROOT / "memory.max").read_text())
        used = int((CGROUP_ROOT / "memory.current").read_text())
        kinds = dict(line.split() for line in (CGROUP_ROOT / "memory.stat").read_text().splitlines())
        # The system gives back what it only keeps in case that it is read again.
        free = min(free, max(limit - used + int(kinds["inactive_file"]), 0))
        total = min(total, limit)
    return free, total


BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Shortage(NamedTuple):
    """What there is too little of, and what to do about it."""

    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.found}; {self.advice}"


def free_bytes(path: Path) -> int:
    """Left for this user on the file system that `path` lies on, or will lie on. Raises OSError."""
    found = os.statvfs(nearest_existing(path))
    return found.f_bavail * found.f_frsize


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))


def max_open_files() -> int | None:
    """The limit that `raise_open_files_limit` can raise to; None for none."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def raise_open_files_limit() -> None:
    """Let this process, and those that it will start, have as many files open as the system allows it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def format_bytes(size: float) -> str:
    """In the largest unit that it fills, powers of 1024: 12.8 MiB."""
    power = 0
    while size >= 1024 and power < len(BYTE_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.1f}".removesuffix(".0") + f" {BYTE_UNITS[power]}"


MAX_RANKS_PER_CORE = 4


def available_cores() -> int:
    """CPU cores that this process may use: its affinity, and the quota of its control group where one is set."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return allowed
