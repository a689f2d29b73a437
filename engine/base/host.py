"""Resources of this host: CPU cores, free memory and disk space, open-file limit."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
CPU_INFO = Path("/proc/cpuinfo")
CPU_INFO_BYTES = 1 << 14  # contains the first core; a host with many cores has megabytes
# avx512_bf16 and amx_bf16 on x86, bf16 on Arm
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def has_bfloat16_instructions() -> bool:
    """Whether the CPU multiplies bfloat16 numbers without converting them to float32 first."""
    try:
        with CPU_INFO.open(errors="replace") as file:
            return not BFLOAT16_FLAGS.isdisjoint(file.read(CPU_INFO_BYTES).split())
    except OSError:
        return False


def free_memory() -> tuple[int, int]:
    """Return free and total memory for this process in bytes, within the limit of its control group (cgroup v2)."""
    # Takes 15 ms to import.
    import psutil

    host = psutil.virtual_memory()
    free, total = int(host.available), int(host.total)
    with suppress(OSError, ValueError, KeyError):
        limit = int((CGROUP_ROOT / "memory.max").read_text())
        used = int((CGROUP_ROOT / "memory.current").read_text())
        kinds = dict(line.split() for line in (CGROUP_ROOT / "memory.stat").read_text().splitlines())
        # The kernel reclaims inactive page cache on demand, so it counts as free.
        free = min(free, max(limit - used + int(kinds["inactive_file"]), 0))
        total = min(total, limit)
    return free, total


def free_bytes(path: Path) -> int:
    """Return the free bytes for this user on the file system of `path`, which need not exist. Raises OSError."""
    status = os.statvfs(nearest_existing(path))
    return status.f_bavail * status.f_frsize


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    return next((candidate for candidate in (path, *path.parents) if candidate.exists()), Path("/"))


def raise_open_files_limit() -> None:
    """Raise the limit of open files of this process and its future children to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# More ranks on the CPU only slow each other down.
MAX_RANKS_PER_CORE = 4


def available_cores() -> int:
    """Return the number of CPU cores for this process: its affinity, limited by the quota of its control group."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return allowed
