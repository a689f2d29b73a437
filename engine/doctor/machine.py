"""Checks that need neither the driver nor torch: cores, memory, runs folder, user folders, environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.doctor.check import Check
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE
from engine.runs.ownership import check_claim
from engine.utils.errors import UsageError
from engine.utils.files import cache_folder, config_folder, own_folder_advice, state_folder, user_path_problem
from engine.utils.host import available_cores, free_bytes, free_memory
from engine.utils.text import pluralize
from engine.utils.units import format_bytes

RANK_BASE_BYTES = 1 << 30  # resident memory of a process that has imported torch
MIN_FREE_DISK_BYTES = 1 << 30
# Debugging variables that slow down every run, and how.
SLOWING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "makes each kernel launch wait for the kernel",
    "NCCL_P2P_DISABLE": "sends GPU-to-GPU traffic through host memory",
    "NCCL_SHM_DISABLE": "sends GPU-to-GPU traffic through the network",
    "NCCL_DEBUG": "makes NCCL write to the log of each run",
    "TORCH_DISTRIBUTED_DEBUG": "adds a consistency check to every collective",
    "TORCH_SHOW_CPP_STACKTRACES": "adds C++ stack traces to errors",
}
# Environment variable and location of each user folder, and what it contains.
USER_FOLDERS = (
    ("XDG_CACHE_HOME", cache_folder, "decoded", "cached data is"),
    ("XDG_CONFIG_HOME", config_folder, "presets", "saved presets are"),
    ("XDG_STATE_HOME", state_folder, "form.json", "the last choices in the form are"),
)
OFF_VALUES = ("", "0", "OFF", "off", "WARN", "VERSION")


def machine_checks(root: Path) -> Iterator[Check]:
    """Yield the checks of this host; runs are written below `root`."""
    yield Check("machine", "cores", "ok", pluralize(available_cores(), "core"))
    yield memory_check(*free_memory())
    yield runs_folder_check(root)
    yield from user_folder_checks()
    yield from environment_checks(os.environ)


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
        return Check("machine", name, "problem", problem.reason, problem.advice, refuses_run=True, code=problem.code)
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


def user_folder_checks() -> Iterator[Check]:
    """Yield a warning for each folder of settings or cached data that is not used because other users can change it."""
    for variable, root, name, contents in USER_FOLDERS:
        if (problem := user_path_problem(root(), name)) is not None:
            found = f"{contents} not used, because {problem}"
            yield Check(
                "machine", "user folders", "warning", found, own_folder_advice(variable), code="foreign-writable"
            )


def environment_checks(environ: Mapping[str, str]) -> Iterator[Check]:
    """Yield a warning for each variable that slows runs down."""
    for name, effect in SLOWING_VARIABLES.items():
        if (value := environ.get(name, "")) not in OFF_VALUES:
            found = f"{name}={value} {effect}"
            yield Check(
                "machine",
                "environment",
                "warning",
                found,
                f"unset {name} unless you are debugging",
                code="slow-setting",
            )
