"""Phrases that several tables and screens say: of runs signs of states, progress and times; of GPUs names and users."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path

from engine.base.errors import Problem
from engine.base.process import user_name
from engine.base.text import list_names, pluralize, printable
from engine.base.units import UNKNOWN, format_age, format_bytes, format_duration
from engine.gpus.current_use import MAX_UNATTRIBUTED_BYTES, Obstacle, find_current_use
from engine.gpus.snapshot import Gpu, GpuProcess, MigInstance, Snapshot
from engine.report.readings import READINGS
from engine.runs.folder import RunFolder, RunState
from engine.runs.run_record import DIVERGED
from engine.runs.run_row import UNKNOWN_STATE, UNREADABLE, RunRow, age_of
from engine.watch.activity import Activity
from tui.screens.keymap import KEYS
from tui.terminal.palette import BAD, GOOD, MUTED, WARNING

# With options, the command does more than the key.
_RESUME_COMMAND = re.compile("`gputrain resume(?: (?:(?! --)[^`])*)?`")
# Symbol and style of each state; screens print the state's name next to them.
STATE_SYMBOLS: dict[str, tuple[str, str]] = {
    RunState.WAITING: ("◌", MUTED),
    RunState.STARTING: ("◌", WARNING),
    RunState.RUNNING: ("●", GOOD),
    RunState.PAUSED: ("‖", WARNING),
    RunState.STOPPING: ("◍", WARNING),
    RunState.FINISHED: ("○", ""),
    RunState.STOPPED: ("◐", MUTED),
    RunState.FAILED: ("✗", BAD),
    RunState.CRASHED: ("✗", BAD),
    RunState.INTERRUPTED: ("✗", BAD),
    Activity.GROWING: ("●", GOOD),
    Activity.QUIET: ("◌", MUTED),
    Activity.ENDED: ("○", ""),
    DIVERGED: ("✗", BAD),
    UNREADABLE: ("✗", BAD),
    UNKNOWN_STATE: ("?", WARNING),
}
FAILED_STATES = (RunState.FAILED, RunState.CRASHED)
# Trainings compile, evaluate and load data for minutes without using their GPUs.
MIN_IDLE_SECONDS = 300.0
FOREIGN_SIGN, MARK = "!", "◆"
FOLD_SIGNS = {False: "▸", True: "▾"}
"""Signs of a sweep by whether its trials are shown."""


def state_symbol(state: str) -> tuple[str, str]:
    """Return the symbol and style of a run state, or of what lists show in its place."""
    return STATE_SYMBOLS[state]


def state_style(row: RunRow) -> str:
    """Return the style of the state of a run."""
    return state_symbol(row.shown_state)[1]


def epochs_text(row: RunRow) -> str:
    """Return how far a run is, of a sweep the number of its trials, and of a command its last step."""
    if row.record.command:
        step = row.record.values.get("step")
        return UNKNOWN if step is None else f"step {step}"
    if row.trials:
        return f"{row.trials} trials"
    planned = row.record.count("total_epochs") or (row.record.config or {}).get("run.epochs", "?")
    return f"{row.record.count('epochs')}/{planned}"


def short_command(row: RunRow) -> str:
    """Return the command of a run without the folder of its program."""
    return without_folder(row.record.command) or UNKNOWN


def without_folder(command: str) -> str:
    """Return a command without the folder of its program, which says less than its script."""
    program, blank, arguments = command.partition(" ")
    return program.rpartition("/")[2] + blank + arguments


def when_text(row: RunRow) -> str:
    """Return when a live run ends, for how long it has run if that is unknown, or how long ago another one ended. It
    changes with time, not only with the row."""
    eta_s = row.record.values.get("eta_seconds")
    if not row.live:
        return f"{format_age(age_of(row.record.updated_at or row.record.started_at))} ago"
    if eta_s is not None:
        return f"ETA {format_duration(eta_s)}"
    return "" if row.state == RunState.WAITING else f"for {format_age(row.age_seconds)}"


def result_text(row: RunRow) -> str:
    """Return why a run waits or how it ended, of one that diverged why its result is void."""
    return row.record.divergence if row.shown_state == DIVERGED else row.message


def note(row: RunRow) -> str:
    """Return why other users can change the run, how it ended, and why it trained on the CPU, as far as known."""
    foreign = f"This run {row.foreign}" if row.foreign else ""
    parts = (foreign, result_text(row), row.record.cpu_fallback)
    return keyed("; ".join(part for part in parts if part))


def keyed(message: str) -> str:
    """Return a printable message for a screen: the key in place of the command that resumes the run."""
    return _RESUME_COMMAND.sub(KEYS["resume"].key, printable(message))


def own_runs_problem(own: Collection[Path], command: str) -> Problem:
    """Return that runs of gputrain in these folders are not listed, and the `command` that lists the runs folder."""
    if len(own) == 1:
        (path,) = own
        advice = f"open it with `gputrain attach {shlex.quote(str(path))}`"
        return Problem(str(path), "is a run of gputrain, which is not listed here", advice, code="recorded-elsewhere")
    places = sorted({str(path.parent) for path in own})
    commands = [f"`{command} --runs-dir {shlex.quote(place)}`" for place in places]
    reason = f"{len(own)} runs of gputrain are not listed here"
    return Problem("", reason, f"list them with {list_names(commands, 2)}", code="recorded-elsewhere")


def resume_problem(folder: RunFolder, state: RunState | None) -> Problem | None:
    """Return why a run in this state, None if it is not known yet, cannot be resumed; None if it can."""
    from engine.jobs.command.spec import has_command

    name = folder.name
    if state is None:
        return Problem("", f"{name} is still loading", code="not-loaded")
    if (problem := folder.owner_problem()) is not None:
        return Problem("", f"{name} {problem}; resume it in a shell with --trust-owner", code="foreign-owner")
    if state.live:
        return Problem("", f"{name} is {state}", code="already-running")
    if state == "finished":
        more = f"`gputrain resume {name} --epochs N` trains it on"
        advice = "start the command again as a new run" if has_command(folder) else more
        return Problem("", f"{name} has already finished; {advice}", code="already-finished")
    if folder.resumable:
        return None
    if state == "interrupted":
        reason = f"{name} was interrupted while it waited for GPUs; press Q, then u to start it again"
        return Problem("", reason, code="interrupted")
    return Problem("", f"{name} has no checkpoint to resume from", code="no-checkpoint")


# Vendor and brand, which the names of GPUs begin with.
BRAND_PREFIXES = ("NVIDIA ", "GeForce ", "Tesla ", "Quadro ")
SHORT_UUID_LENGTH = 12  # `GPU-` or `MIG-` and the first 8 digits
# Names of throttle reasons (`engine.gpus.nvml.THROTTLE_REASONS`) that do not speak for themselves in a note.
THROTTLE_WORDS = {
    "thermal": "heat",
    "hardware thermal": "heat",
    "power cap": "power",
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


def instance_name(instance: MigInstance) -> str:
    """Return the profile of a MIG instance without the name of its GPU: `MIG 1g.10gb`."""
    name = printable(instance.name.value or UNKNOWN)
    return name[max(name.rfind("MIG "), 0) :]


def gpu_name(device: str, snapshot: Snapshot | None) -> str:
    """Return the index of a GPU with this UUID, as in `3`; `3:1` for an instance of GPU 3 with GPU instance ID 1.

    A UUID that is not in `snapshot`, because the GPU is on another host, is shortened. Other devices are unchanged.
    """
    for gpu in snapshot.gpus if snapshot is not None else ():
        if gpu.uuid == device:
            return str(gpu.index)
        for instance in gpu.instances:
            if instance.uuid == device:
                return f"{gpu.index}:{instance.gpu_instance}"
    return printable(device[:SHORT_UUID_LENGTH] if device.startswith(("GPU-", "MIG-")) else device)


def gpu_key(gpu: Gpu) -> str:
    """Return the key of a GPU in lists: its UUID, or its index if the driver never reported a UUID."""
    return gpu.uuid or f"#{gpu.index}"


def is_free(gpu: Gpu) -> bool:
    """Whether nothing uses the GPU, as far as is known."""
    processes = gpu.processes.value
    if gpu.state != "ok" or processes is None or gpu.runs:
        return False
    return not any(process.run or process.kind == "compute" for process in processes) and find_current_use(gpu) is None


def is_mine(gpu: Gpu) -> bool:
    """Whether a run or a process of this user is on the GPU."""
    me = user_name()
    return any(run not in gpu.run_owners for run in gpu.runs) or any(
        process.user.value == me for process in gpu.processes.value or () if process.kind == "compute"
    )


def users(gpu: Gpu) -> list[str]:
    """Return who uses a GPU: its runs with their ranks, and the users of other compute processes."""
    ranks: dict[str, list[str]] = {}
    for process in gpu.processes.value or ():
        if process.run:
            ranks.setdefault(process.run, []).append(str(process.rank))
    names = {run: f"{run} ({gpu.run_owners[run]})" if run in gpu.run_owners else run for run in (*ranks, *gpu.runs)}
    runs = [f"{names[run]} {'rank' if len(ranks[run]) == 1 else 'ranks'} {', '.join(ranks[run])}" for run in ranks]
    runs += [names[run] for run in gpu.runs if run not in ranks]
    others = [process for process in gpu.processes.value or () if process.run is None and process.kind == "compute"]
    others_names = dict.fromkeys(process.user.value or f"pid {process.pid}" for process in others)
    return [printable(name) for name in (*runs, *others_names)]


def holders_text(gpu: Gpu) -> str:
    """Return how much of a GPU is held by whom: `GPU 0: 72.0/79.6 GiB, nobody`."""
    memory = READINGS["memory_used"].full_text(gpu.value("memory_used"), gpu.value("memory_total"))
    return f"GPU {gpu.index}: {memory}, {', '.join(users(gpu)) or 'nobody'}"


def users_text(gpu: Gpu) -> str:
    """Return who uses a GPU in one line, else `free`, `in use`, `no device` or `unknown`."""
    if is_free(gpu):
        return "free"
    use = find_current_use(gpu)
    word = (
        "in use"
        if use is None
        else {Obstacle.UNKNOWN: "unknown", Obstacle.NO_INSTANCES: "no device"}.get(use.obstacle, "in use")
    )
    return ", ".join(users(gpu)) or ("unknown" if gpu.processes.value is None else word)


def reserved_text(gpu: Gpu) -> str:
    """Return how much of its memory runs have reserved, "" if they have reserved whole GPUs."""
    return f"{format_bytes(gpu.reserved_by_runs)} reserved" if gpu.reserved_by_runs else ""


def gpu_warnings(gpu: Gpu) -> list[str]:
    """Return what slows the GPU down, its memory errors, and for how long a process has held it without using it."""
    reasons = dict.fromkeys(
        THROTTLE_WORDS.get(reason, reason) for reason in gpu.value("throttle") or () if reason != "idle"
    )
    found = [f"slowed: {', '.join(reasons)}"] if reasons else []
    if gpu.value("ecc_uncorrected"):
        found.append(pluralize(gpu.value("ecc_uncorrected"), "ECC error"))
    idle = max(filter(is_idle, gpu.processes.value or ()), key=lambda process: process.idle.value or 0.0, default=None)
    found += [] if idle is None else [idle_note(idle)]
    return [printable(note) for note in found]


def kind_notes(gpu: Gpu) -> list[str]:
    """Return what is unusual about the kind of the GPU: its MIG instances, and memory that it shares with the host."""
    found = [f"{len(gpu.instances)} x MIG"] if gpu.mig_enabled else []
    return [*found, *(["integrated"] if gpu.value("integrated") else [])]


def idle_note(process: GpuProcess) -> str:
    """Return that a process holds memory of a GPU without computing, in few words; empty if it computes."""
    if not is_idle(process):
        return ""
    return f"idle {'≥ ' if process.idle_at_least else ''}{format_age(process.idle.value or 0.0)}"


def is_idle(process: GpuProcess) -> bool:
    """Whether a process has held memory of a GPU for long without computing."""
    idle, memory = process.idle.value or 0.0, process.gpu_memory.value or 0
    return process.kind == "compute" and idle >= MIN_IDLE_SECONDS and memory >= MAX_UNATTRIBUTED_BYTES


def holder_sentence(process: GpuProcess) -> str:
    """Return what is to be known of a process that holds a GPU, such as `holds 61 GiB, idle 42 min, by ana`; empty if
    it is not idle."""
    if not is_idle(process):
        return ""
    idle = f"idle {'for at least ' if process.idle_at_least else ''}{format_age(process.idle.value or 0.0)}"
    held = f"holds {READINGS['gpu_memory'].text(process.gpu_memory.value or 0)}"
    return printable(f"{held}, {idle}, by {process.user.value or '?'}")


def silence_reason(gpu: Gpu) -> str:
    """Return why a GPU does not answer, or since when."""
    return f"no answer for {gpu.age:.0f} s" if gpu.state == "stale" else printable(str(gpu["util"].reason))


def pcie_link(gpu: Gpu) -> str:
    """Return generation and width of the PCIe link: `5.0 x16`."""
    generation, width = gpu.value("pcie_generation"), gpu.value("pcie_width")
    return UNKNOWN if generation is None or width is None else f"{generation}.0 x{width}"


def no_driver_problem(snapshot: Snapshot) -> Problem:
    """Return why there are no GPUs to show, and what a run would use instead."""
    from engine.base.host import available_cores

    error, cores = printable(snapshot.error or ""), pluralize(available_cores(), "core")
    if snapshot.pending:
        reason = f"{snapshot.host}: {error}. A run waits longer for the driver; try again."
        return Problem("", reason, code="timed-out")
    reason = f"No NVIDIA driver on {snapshot.host} ({error}): runs use the CPU, {cores}."
    return Problem("", reason, code="driver-unavailable")
