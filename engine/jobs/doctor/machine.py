"""Checks that need neither the driver nor torch: cores, memory, runs folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.base.errors import UsageError
from engine.base.host import available_cores, free_bytes, free_memory
from engine.base.text import pluralize
from engine.base.units import format_bytes
from engine.jobs.doctor.check import Check
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE
from engine.runs.ownership import check_claim

RANK_BASE_BYTES = 1 << 30  # resident memory of a process that has imported torch
MIN_FREE_DISK_BYTES = 1 << 30


def machine_checks(root: Path) -> Iterator[Check]:
    """Yield the checks of this host; runs are written below `root`."""
    yield Check("machine", "cores", "ok", pluralize(available_cores(), "core"))
    yield memory_check(*free_memory())
    yield runs_folder_check(root)


def memory_check(free: int, total: int) -> Check:
    found = f"{format_bytes(free)} of {format_bytes(total)} free"
    if free >= RANK_BASE_BYTES:
        return Check("machine", "memory", "ok", found)
    advice = (
        "end processes that use much memory (`ps aux --sort -rss | head`), or increase the memory limit of the "
        "container"
    )
    need = f"each rank needs about {format_bytes(RANK_BASE_BYTES)} before it loads an image"
    return Check("machine", "memory", "warning", f"{found}; {need}", advice, code="out-of-memory")


def runs_folder_check(root: Path) -> Check:
    """Check that run folders can be created, and that the disk is not full."""
    name, advice = "runs folder", f"free disk space, or {OTHER_RUNS_FOLDER_ADVICE}"
    try:
        check_claim(root, None, resume=False)
        free = free_bytes(root)
    except UsageError as error:
        problem = error.problems[0]
        return Check("machine", name, "problem", problem.reason, problem.advice, code=problem.code)
    except OSError as error:
        return Check(
            "machine", name, "problem", f"{root} cannot be examined: {error.strerror}", advice, code="not-readable"
        )
    found = f"{root} has {format_bytes(free)} free"
    if free == 0:
        return Check("machine", name, "problem", found, advice, code="disk-full")
    if free < MIN_FREE_DISK_BYTES:
        return Check("machine", name, "warning", found, advice, code="disk-full")
    return Check("machine", name, "ok", found)
