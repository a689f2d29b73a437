"""What the screens say about a GPU in words: its name, who uses it, what slows it down, why it does not answer."""

from __future__ import annotations

from engine.gpus.current_use import find_current_use
from engine.gpus.snapshot import Gpu, Snapshot
from engine.utils.text import pluralize, printable
from tui.text.gpus import BRAND_PREFIXES
from tui.text.tables import UNKNOWN

# Names of throttle reasons (`engine.gpus.nvml.THROTTLE_REASONS`) that do not speak for themselves in a note.
THROTTLE_WORDS = {
    "thermal": "heat",
    "hardware thermal": "heat",
    "power cap": "power limit",
    "hardware slowdown": "hardware",
    "reliability": "voltage limit",
}


def short_name(gpu: Gpu) -> str:
    """Return the product name of a GPU without vendor and brand."""
    name = printable(gpu.value("name") or UNKNOWN)
    for brand in BRAND_PREFIXES:
        name = name.removeprefix(brand)
    return name


def common_name(snapshot: Snapshot) -> str | None:
    """Return the name that all GPUs share; None if there are several models."""
    names = {short_name(gpu) for gpu in snapshot.gpus}
    return names.pop() if len(names) == 1 else None


def is_free(gpu: Gpu) -> bool:
    """Whether nothing uses the GPU, as far as is known."""
    processes = gpu.processes.value
    if gpu.state != "ok" or processes is None or gpu.runs:
        return False
    return not any(process.run or process.kind == "compute" for process in processes) and find_current_use(gpu) is None


def users(gpu: Gpu) -> list[str]:
    """Return who uses a GPU: its runs with their ranks, and the users of other compute processes."""
    ranks: dict[str, list[str]] = {}
    for process in gpu.processes.value or ():
        if process.run:
            ranks.setdefault(process.run, []).append(str(process.rank))
    runs = [f"{run} {'rank' if len(ranks[run]) == 1 else 'ranks'} {', '.join(ranks[run])}" for run in ranks]
    runs += [run for run in gpu.runs if run not in ranks]
    others = [process for process in gpu.processes.value or () if process.run is None and process.kind == "compute"]
    names = dict.fromkeys(process.user.value or f"pid {process.pid}" for process in others)
    return [printable(name) for name in (*runs, *names)]


def notes(gpu: Gpu) -> list[str]:
    """Return what slows the GPU down, its memory errors, and its MIG instances."""
    reasons = dict.fromkeys(
        THROTTLE_WORDS.get(reason, reason) for reason in gpu.value("throttle") or () if reason != "idle"
    )
    found = [f"slowed: {', '.join(reasons)}"] if reasons else []
    if gpu.value("ecc_uncorrected"):
        found.append(pluralize(gpu.value("ecc_uncorrected"), "ECC error"))
    if gpu.mig_enabled:
        found.append(pluralize(len(gpu.instances), "MIG instance"))
    return [printable(note) for note in found]


def silence_reason(gpu: Gpu) -> str:
    """Return why a GPU does not answer, or since when."""
    return f"no answer for {gpu.age:.0f} s" if gpu.state == "stale" else printable(str(gpu["util"].reason))
