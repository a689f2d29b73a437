"""What is known without asking a driver or torch: cores, memory, where runs lie, and what slows them down."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.doctor.check import Check
from engine.utils.host import available_cores, format_bytes, free_bytes, free_memory, nearest_existing
from engine.utils.text import pluralize

# About what torch takes by itself in a process of its own.
RANK_BASE_BYTES = 1 << 30
MIN_FREE_DISK_BYTES = 1 << 30
# Variables that make every run slow where they are forgotten, and what they do.
SLOWING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "makes every step wait for every kernel",
    "NCCL_P2P_DISABLE": "sends what GPUs tell each other through host memory",
    "NCCL_SHM_DISABLE": "sends what GPUs tell each other through the network",
    "NCCL_DEBUG": "makes NCCL write to the log of each run",
    "TORCH_DISTRIBUTED_DEBUG": "makes every collective check itself",
    "TORCH_SHOW_CPP_STACKTRACES": "makes errors slow and long",
}
OFF_VALUES = ("", "0", "OFF", "off", "WARN", "VERSION")


def machine_checks(root: Path) -> Iterator[Check]:
    """For runs in a folder below `root`."""
    yield Check("machine", "cores", "ok", pluralize(available_cores(), "core"))
    yield memory_check(*free_memory())
    yield runs_folder_check(root)
    yield from environment_checks(os.environ)


def memory_check(free: int, total: int) -> Check:
    found = f"{format_bytes(free)} of {format_bytes(total)} free"
    if free >= RANK_BASE_BYTES:
        return Check("machine", "memory", "ok", found)
    advice = "end what takes it (`ps aux --sort -rss | head`), or take a container with more memory"
    need = f"a rank takes about {format_bytes(RANK_BASE_BYTES)} before it loads an image"
    return Check("machine", "memory", "warning", f"{found}, and {need}", advice)


def runs_folder_check(root: Path) -> Check:
    """Whether runs can be written, and whether there is some room."""
    name, there = "runs folder", nearest_existing(root)
    elsewhere = "let runs lie elsewhere: --runs-dir or GPUTRAIN_RUNS"
    if not there.is_dir():
        return Check("machine", name, "problem", f"{there} is a file, and runs need a folder", elsewhere)
    if not os.access(there, os.W_OK | os.X_OK):
        return Check("machine", name, "problem", f"{there} cannot be written to", elsewhere)
    try:
        free = free_bytes(root)
    except OSError as error:
        return Check("machine", name, "problem", f"{there} cannot be looked at: {error.strerror}", elsewhere)
    found = f"{root} has {format_bytes(free)} free"
    if free == 0:
        return Check("machine", name, "problem", found, f"make room, or {elsewhere}")
    if free < MIN_FREE_DISK_BYTES:
        return Check("machine", name, "warning", found, f"make room, or {elsewhere}")
    return Check("machine", name, "ok", found)


def environment_checks(environ: Mapping[str, str]) -> Iterator[Check]:
    """One for each that is set and slows runs down."""
    for name, what in SLOWING_VARIABLES.items():
        if (value := environ.get(name, "")) not in OFF_VALUES:
            found = f"{name}={value} {what}"
            yield Check("machine", "environment", "warning", found, f"unset {name} unless you look for a fault")
