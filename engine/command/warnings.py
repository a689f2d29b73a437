"""Warnings before a command starts: arguments that choose GPUs again, and programs that leave the run.

They are guesses from words: a command that is warned of starts all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile, zip_longest

from engine.command.inner_commands import InnerCommand, inner_commands
from engine.utils.errors import Problem
from engine.utils.text import pluralize, printable

MAX_SHOWN_CHARS = 60
CONTAINER_PROGRAMS = frozenset({"docker", "podman", "nerdctl"})
CONTAINER_VERBS = frozenset({"run", "exec"})
SUBMITTERS = frozenset({"sbatch", "qsub", "bsub"})
# Programs that give the command to a process outside the run, and end.
DEPARTURES = frozenset({"tmux", "screen", "systemd-run", "at", "batch", "setsid"})
DETACH_ADVICE = "leave it out: `gputrain run --detach` survives the end of the terminal"

# What srun passes on to its tasks. It shows their state at SIGINT, and kills them at SIGTERM and SIGHUP.
SRUN_SIGNALS = ("SIGUSR1", "SIGUSR2")

# The last part of a name, spelled with underscores: --trainer.devices=2 and device=0 count, too.
CHOICE_NAMES = frozenset({
    "device", "devices", "device_ids", "gpu", "gpus", "gpu_id", "gpu_ids", "cuda", "cuda_visible_devices",
})  # fmt: skip
COUNT_NAMES = frozenset({"devices", "gpus", "num_gpus", "n_gpus", "num_devices", "gpus_per_node", "nproc_per_node"})
GPU_PLACEHOLDERS = ("{gpus}", "{ids}", "{uuids}")
_WAIT_OPTION = re.compile(r"--wait|-[cf]*w[cfw]*")
_INDICES = re.compile(r"[\[(]?\d+(,\s*\d+)*,?[\])]?")


def command_warnings(argv: Sequence[str], gpus: int, stop_signal: str = "SIGINT") -> list[Problem]:
    """Return what a user should know before this command starts on this number of GPUs (0: the CPU).

    `argv` is as typed: a value with a placeholder such as {ids} names the reserved GPUs, whatever they will be.
    `stop_signal` asks the command to stop.
    """
    commands = inner_commands(argv)
    found = [warning for command in commands for warning in _warnings_of(command, gpus)]
    if stop_signal not in SRUN_SIGNALS and any(command.program == "srun" for command in commands):
        reason = f"does not pass {stop_signal} on, so a stop kills its tasks before they can save"
        advice = "let the program handle another signal, as in --stop-signal USR2"
        found.append(Problem("srun", reason, advice, code="wrapper-breaks-run"))
    if gpus == 0 and (names := [name for name in GPU_PLACEHOLDERS if any(name in word for word in argv)]):
        reason = "the run has no GPU, so this is 0" if names == ["{gpus}"] else "the run has no GPU"
        found.append(Problem(" ".join(names), reason, "type a number, or reserve GPUs with --gpus", code="no-gpu"))
    # Several inner commands may have the same fault.
    return list(dict.fromkeys(found))


def _warnings_of(command: InnerCommand, gpus: int) -> Iterator[Problem]:
    program = command.program
    if "nohup" in command.wrappers:
        reason = "writes the output to nohup.out, so the log and the metrics of the run are empty"
        yield Problem("nohup", reason, DETACH_ADVICE, code="wrapper-breaks-run")
    if program in CONTAINER_PROGRAMS and not CONTAINER_VERBS.isdisjoint(command.words[1:3]):
        reason = "the container is no process of the run: it may outlive it, and use other GPUs unnoticed"
        advice = "add --rm, --init and --gpus '\"device={uuids}\"'"
        yield Problem(program, reason, advice, code="leaves-run")
        return
    reason = "starts the command outside the run, which ends at once"
    if command.is_background:
        yield Problem("&", reason, "leave it out, or end the shell command with `; wait`", code="leaves-run")
    for name in DEPARTURES.intersection((*command.wrappers, program)):
        if name == "setsid" and _waits(command):
            continue
        yield Problem(name, reason, DETACH_ADVICE, code="leaves-run")
    if program in SUBMITTERS:
        yield Problem(program, reason, "put `gputrain run` into the batch script", code="leaves-run")
    if program == "ssh":
        reason = "the command computes on another host, while the run reserves GPUs of this one"
        yield Problem("ssh", reason, "type `gputrain run` on that host", code="leaves-run")
    for typed, name, value in _options((*command.prefix, *command.words[1:])):
        if name in COUNT_NAMES and value.isdecimal() and int(value) > 0:
            if int(value) != gpus > 0:
                reason = f"the run reserves {pluralize(gpus, 'GPU')}"
                yield Problem(typed, reason, "type {gpus} in place of the number", code="conflict")
        elif name in CHOICE_NAMES and _INDICES.fullmatch(value):
            reason = "the program may choose GPUs that the run has not reserved"
            yield Problem(typed, reason, "leave it out, or type {ids} in place of the numbers", code="gpu-override")


def _waits(command: InnerCommand) -> bool:
    """Whether setsid, one of the wrappers, waits for its command."""
    following = command.prefix[command.wrappers.index("setsid") + 1 :] if "setsid" in command.wrappers else ()
    return any(_WAIT_OPTION.fullmatch(word) for word in takewhile(lambda word: word.startswith("-"), following))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the options `--name value` and `--name=value` and the settings `name=value`: as typed, the last part of the
    name, and the value."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        option, sign, value = word.partition("=")
        if not sign and word.startswith("-") and not following.startswith("-"):
            word, value = f"{word} {following}", following
        yield printable(word)[:MAX_SHOWN_CHARS], option.lstrip("-+").rpartition(".")[2].replace("-", "_").lower(), value
