"""Warnings before a command starts: arguments and scripts that choose GPUs again, and programs that leave the run.

They are guesses from words, and from a bounded read of the script: a command that is warned of starts all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from engine.command.inner_commands import InnerCommand, inner_commands
from engine.utils.errors import Problem
from engine.utils.files import read_bytes
from engine.utils.text import pluralize, printable

MAX_SCRIPT_BYTES = 1 << 18
MAX_SHOWN_CHARS = 60

CONTAINER_PROGRAMS = frozenset({"docker", "podman", "nerdctl"})
CONTAINER_VERBS = frozenset({"run", "exec", "start", "compose"})
SUBMITTERS = frozenset({"sbatch", "qsub", "bsub"})
# Programs that give the command to a process outside the run, and end.
DEPARTURES = frozenset({"tmux", "screen", "systemd-run", "at", "batch", "daemonize"})

# What srun passes on to its tasks. It shows their state at SIGINT, and kills them at SIGTERM and SIGHUP.
SRUN_SIGNALS = ("SIGUSR1", "SIGUSR2")

# The last part of a name, spelled with underscores: --trainer.devices=2 and device=0 count, too.
CHOICE_NAMES = frozenset({
    "device", "devices", "device_id", "device_ids", "gpu", "gpus", "gpu_id", "gpu_ids", "gpuid", "gpu_devices",
    "cuda", "cuda_device", "cuda_devices", "visible_devices",
})  # fmt: skip
COUNT_NAMES = frozenset({
    "devices", "gpus", "num_gpus", "n_gpus", "n_gpu", "ngpus", "num_devices", "gpus_per_node", "nproc_per_node",
})  # fmt: skip
GPU_PLACEHOLDERS = ("{gpus}", "{ids}", "{uuids}")
# Options with which a launcher sets CUDA_VISIBLE_DEVICES: `main` in deepspeed/launcher/runner.py, and
# `prepare_multi_gpu_env` in accelerate/utils/launch.py.
LAUNCHER_NAMES = {
    "deepspeed": frozenset({"include", "exclude", "num_gpus", "i", "e"}),
    "accelerate": frozenset({"gpu_ids"}),
}
_INDICES = re.compile(r"[\[(]?\d+(,\s*\d+)*,?[\])]?")
_CUDA_INDEX = re.compile(r"cuda:(\d+)")
_VISIBLE = "CUDA_VISIBLE_DEVICES="
_PYTHON_SETS_VISIBLE = re.compile(r"^[^#\n]*environ\[\s*[\"']CUDA_VISIBLE_DEVICES[\"']\s*\]\s*=(?!=)", re.MULTILINE)
_SHELL_SETS_VISIBLE = re.compile(r"^[^#\n]*\bCUDA_VISIBLE_DEVICES=", re.MULTILINE)
_IMPORTS_TRAINER = re.compile(
    r"^[ \t]*from[ \t]+(?:transformers|trl|sentence_transformers)\b[\w.]*[ \t]+import[ \t]*"
    r"(?:\([^()]*?|[^\n(]*?)\b\w*Trainer\b|^[^#\n]*\btransformers\.\w*Trainer\(",
    re.MULTILINE,
)
# With a device map, the Trainer splits the model over the GPUs.
_DEVICE_MAP = "device_map"


def command_warnings(argv: Sequence[str], gpus: int, cwd: Path, stop_signal: str = "SIGINT") -> list[Problem]:
    """Return what a user should know before this command starts on this number of GPUs (0: the CPU).

    `argv` is as typed: a value with a placeholder such as {ids} names the reserved GPUs, whatever they will be.
    `stop_signal` asks the command to stop.
    """
    commands = inner_commands(argv)
    found = [warning for command in commands for warning in _warnings_of(command, gpus, cwd)]
    if stop_signal not in SRUN_SIGNALS and any(command.program == "srun" for command in commands):
        reason = f"does not pass {stop_signal} on, so a stop kills its tasks before they can save"
        advice = "let the program handle another signal, as in --stop-signal USR2"
        found.append(Problem("srun", reason, advice, code="wrapper-breaks-run"))
    if gpus == 0 and (names := [name for name in GPU_PLACEHOLDERS if any(name in word for word in argv)]):
        reason = "the run has no GPU, so this is 0" if names == ["{gpus}"] else "the run has no GPU"
        found.append(Problem(" ".join(names), reason, "type a number, or reserve GPUs with --gpus", code="no-gpu"))
    # Several inner commands may have the same fault.
    return list(dict.fromkeys(found))


def _warnings_of(command: InnerCommand, gpus: int, cwd: Path) -> Iterator[Problem]:
    yield from _departures(command)
    yield from _visible_devices(command)
    if command.program in CONTAINER_PROGRAMS:
        yield from _container(command)
        return
    yield from _device_options(command, gpus)
    yield from _script(command, gpus, cwd)


def _departures(command: InnerCommand) -> Iterator[Problem]:
    """Yield a warning for each program that takes the command out of the run."""
    if {"conda", "run"} <= set(command.wrappers) and not {"--no-capture-output", "--live-stream"} & set(command.prefix):
        # conda#9412 and conda#10351
        yield Problem(
            "conda run",
            "keeps the output until the end, and passes no SIGTERM to the command",
            "activate the environment and leave it out, or type `conda run --no-capture-output`",
            code="wrapper-breaks-run",
        )
    if "nohup" in command.wrappers:
        yield Problem(
            "nohup",
            "writes the output to nohup.out, so the log and the metrics of the run are empty",
            "leave it out: `gputrain run --detach` survives the end of the terminal",
            code="wrapper-breaks-run",
        )
    if "setsid" in command.wrappers and not {"-w", "--wait"} & set(command.prefix):
        yield _departure("setsid", "leave it out: `gputrain run --detach` survives the end of the terminal")
    if command.is_background:
        yield _departure("&", "leave it out, or end the shell command with `; wait`")
    if command.program in DEPARTURES:
        yield _departure(command.program, "leave it out: `gputrain run --detach` survives the end of the terminal")
    if command.program in SUBMITTERS:
        yield _departure(command.program, "put `gputrain run` into the batch script")
    if command.program == "ssh":
        yield Problem(
            "ssh",
            "the command computes on another host, while the run reserves GPUs of this one",
            "type `gputrain run` on that host",
            code="leaves-run",
        )


def _departure(program: str, advice: str) -> Problem:
    reason = "starts the command outside the run, which ends at once"
    return Problem(program, reason, advice, code="leaves-run")


def _container(command: InnerCommand) -> Iterator[Problem]:
    words = command.words[1:]
    verb = next((word for word in words[:2] if word in CONTAINER_VERBS), None)
    if verb is None:
        return
    reason = "the container is no process of the run: it may outlive it, and use other GPUs unnoticed"
    advice = f"add --rm and --init, and end it with `{command.program} stop` if it is left behind"
    yield Problem(f"{command.program} {verb}", reason, advice, code="leaves-run")
    for typed, option, value in _options(words):
        if option == "--gpus" and "{" not in value:
            reason = "the container gets these GPUs, not the reserved ones"
            yield Problem(typed, reason, "type --gpus '\"device={uuids}\"'", code="gpu-override")


def _visible_devices(command: InnerCommand) -> Iterator[Problem]:
    words = [*command.prefix, *(command.words if command.program in ("export", "declare") else ())]
    for word in words:
        # Without a value, or with -1, the command uses no GPU.
        if word.startswith(_VISIBLE) and word.removeprefix(_VISIBLE) not in ("", "-1", "{ids}", "{uuids}"):
            yield Problem(
                _shown(word),
                "may choose GPUs that the run has not reserved",
                "leave it out: it is set",
                code="gpu-override",
            )


def _device_options(command: InnerCommand, gpus: int) -> Iterator[Problem]:
    """Yield a warning for each argument that chooses GPUs, or another number of them than is reserved."""
    yield from _launcher_options(command)
    launcher_names = LAUNCHER_NAMES.get(command.program, frozenset())
    count_names = COUNT_NAMES | {"num_processes"} if command.program == "accelerate" else COUNT_NAMES
    for typed, option, value in _options(command.words[1:]):
        name = _name(option)
        is_count = value.isdecimal() and (int(value) > 0 or name not in CHOICE_NAMES)
        if "{" in value or name in launcher_names:
            continue
        if name in CHOICE_NAMES and (match := _CUDA_INDEX.fullmatch(value)):
            if int(match[1]) >= gpus > 0:
                reason = f"the run reserves {pluralize(gpus, 'GPU')}, which the program numbers from cuda:0"
                advice = "type a lower number, or reserve more with --gpus"
                yield Problem(typed, reason, advice, code="out-of-range")
        elif name in count_names and is_count:
            if int(value) != gpus > 0:
                reason = f"the run reserves {pluralize(gpus, 'GPU')}"
                yield Problem(typed, reason, "type {gpus} in place of the number", code="conflict")
        elif name in CHOICE_NAMES and _INDICES.fullmatch(value):
            # ultralytics before 8.4 and the YOLO repositories number all GPUs, other programs the visible ones.
            advice = "type {ids} in place of the numbers" if command.program == "yolo" else "leave it out"
            reason = "the program may choose GPUs that the run has not reserved"
            yield Problem(typed, reason, advice, code="gpu-override")


def _launcher_options(command: InnerCommand) -> Iterator[Problem]:
    """Yield a warning for each option of a launcher that replaces CUDA_VISIBLE_DEVICES."""
    names = LAUNCHER_NAMES.get(command.program, frozenset())
    for typed, option, value in _options(command.own_arguments):
        if _name(option) not in names or "{" in value or value == "all":
            continue
        if command.program == "deepspeed":
            advice = "leave it out, or type --include localhost:{ids}"
            yield Problem(typed, "deepspeed ignores the reserved GPUs with this option", advice, code="gpu-override")
        else:
            reason = "accelerate uses these GPUs, not the reserved ones"
            yield Problem(typed, reason, "leave it out", code="gpu-override")


def _name(option: str) -> str:
    return option.lstrip("-+").rpartition(".")[2].replace("-", "_").lower()


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the options `--name value` and `--name=value` and the settings `name=value`: as typed, name and value."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, sign, value = word.partition("=")
        if sign:
            yield _shown(word), name, value
        elif word.startswith("-") and following and not following.startswith("-"):
            yield _shown(f"{word} {following}"), word, following


def _script(command: InnerCommand, gpus: int, cwd: Path) -> Iterator[Problem]:
    """Yield warnings about the script of a command. A script that cannot be read, or is long, has none."""
    if not command.script:
        return
    try:
        # Links are followed: it is what the user has typed.
        text = read_bytes((cwd / command.script).resolve(), MAX_SCRIPT_BYTES).decode(errors="replace")
    except (OSError, RuntimeError, ValueError):
        return
    shown = _shown(command.script)
    sets_visible = _SHELL_SETS_VISIBLE if command.script.endswith(".sh") else _PYTHON_SETS_VISIBLE
    if match := sets_visible.search(text):
        line = text.count("\n", 0, match.end()) + 1
        yield Problem(
            f"{shown}:{line}",
            "sets CUDA_VISIBLE_DEVICES, and may choose GPUs that the run has not reserved",
            "delete the line",
            code="gpu-override",
        )
    if gpus > 1 and command.is_python_script and _DEVICE_MAP not in text and _IMPORTS_TRAINER.search(text):
        yield Problem(
            shown,
            f"in one process, the Trainer of Hugging Face uses {gpus} GPUs with the slow DataParallel",
            f"type torchrun --nproc-per-node {{gpus}} {shown}",
            code="slow-setting",
        )


def _shown(word: str) -> str:
    text = printable(word)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
