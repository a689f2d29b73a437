"""Environment of a command: what it inherits from the shell in which it was typed, and the variables of torchrun.

`engine.base.redaction` hides its secrets where it is shown. `engine.jobs.command.spec` stores it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from engine.base.errors import Problem, raise_if_any
from engine.base.text import printable
from engine.gpus.visible_devices import VISIBILITY_VARIABLES
from engine.jobs.command.inner_commands import typed_command
from engine.jobs.command.spec import Program

# A command must not believe that it is a rank of the process in which it was typed.
RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME",
})  # fmt: skip
RANK_PREFIXES = ("MASTER_", "TORCHELASTIC_")
SLURM_PREFIX = "SLURM_"
# Set for each command anew.
MARKER_VARIABLE = "GPUTRAIN_RUN_ID"
OWN_VARIABLES = frozenset({MARKER_VARIABLE, "GPUTRAIN_METRICS"})
# torchrun takes each option that it is not given from PET_<OPTION> (torch/distributed/argparse_util.py).
LOG_DIR, TEE, STANDALONE, LOCAL_ADDR = "PET_LOG_DIR", "PET_TEE", "PET_STANDALONE", "PET_LOCAL_ADDR"
BOTH_STREAMS = "3"
_NODE_OPTIONS = ("--nnodes", "--node-rank", "--rdzv-", "--master-", "--standalone")
_NODE_VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "PET_RDZV_", "PET_MASTER_", "PET_STANDALONE")
_ONE_NODE = ("1", "1:1")


def capture_environment(own: Mapping[str, str], settings: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a command that is typed in the environment `own`.

    `settings` are the values of `--env`: `KEY=VALUE`, or the `NAME` of a variable in `own`, which is kept even if the
    command would not inherit it. Raises UsageError.
    """
    inherited = {name: value for name, value in own.items() if not _is_left_out(name, own)}
    return inherited | _read_settings(settings, own)


def renew_environment(
    command: Program, own: Mapping[str, str], settings: Sequence[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment of a stored command that starts again from the environment `own`, and the names of its
    variables that may have placeholders.

    It is the one that was captured, with the values of `--env` (`settings`). The variables of Slurm are those of the
    job in which it starts again. Raises UsageError.
    """
    kept = {
        name: value
        for name, value in command.environment.items()
        if not name.startswith(SLURM_PREFIX) or name in command.expanded
    }
    current = {name: value for name, value in own.items() if name.startswith(SLURM_PREFIX)}
    typed = _read_settings(settings, own)
    expanded = [name for name in command.expanded if name not in typed]
    expanded += (name for name, sign, _ in (setting.partition("=") for setting in settings) if sign)
    return current | kept | typed, tuple(expanded)


def _is_left_out(name: str, own: Mapping[str, str]) -> bool:
    if name in RANK_VARIABLES or name in OWN_VARIABLES or name.startswith(RANK_PREFIXES):
        return True
    # Inside the command of another run, they are that run's.
    return name in (LOG_DIR, TEE, STANDALONE, LOCAL_ADDR) and MARKER_VARIABLE in own


def _read_settings(settings: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--env`. Raises UsageError with every setting that cannot be used."""
    found: dict[str, str] = {}
    problems: list[Problem] = []
    for setting in settings:
        name, sign, value = setting.partition("=")
        if not name or "\0" in setting:
            problems.append(
                Problem(
                    "--env", f"{printable(setting)!r} names no variable", "type KEY=VALUE or NAME", code="invalid-value"
                )
            )
        elif name in VISIBILITY_VARIABLES:
            reason = f"{name} is set from the reserved GPUs"
            problems.append(Problem("--env", reason, "choose GPUs with --gpus", code="conflict"))
        elif not sign and name not in own:
            reason = f"{printable(name)} is not set in this shell"
            problems.append(
                Problem("--env", reason, f"export it, or type --env {printable(name)}=VALUE", code="missing-value")
            )
        else:
            found[name] = value if sign else own[name]
    raise_if_any(problems)
    return found


def torchrun_variables(argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables from which torchrun takes its options, if the command is torchrun or starts it.

    `argv` has no placeholders any more. Each rank of several gets a log and an error file below `folder`, and its lines
    are echoed to the output of torchrun. Options of the command and variables of the user win. torchrun chooses a free
    port where it would take 29500, on which runs of one host collide.
    """
    words = typed_command(argv).torchrun_words
    options = dict[str, str]()
    for word, following in zip_longest(words or (), (words or ())[1:], fillvalue=""):
        name, sign, value = word.partition("=")
        if word.startswith("-"):
            options[name.replace("_", "-")] = value if sign else following
    found = {LOG_DIR: str(folder)}
    if words is None or _may_be_echoed(options, environ):
        found[TEE] = BOTH_STREAMS
    if words is not None and _is_on_one_node(options, environ):
        # With a free port, its ranks would connect to the name of the host, which need not be known there.
        found |= {STANDALONE: "1", LOCAL_ADDR: "127.0.0.1"}
    return {name: value for name, value in found.items() if name not in environ}


def _may_be_echoed(options: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Whether torchrun may write its ranks' output to files and echo it from there.

    A single rank would lose its terminal, and gain nothing. Output that the user redirects would come to the terminal.
    """
    if "PET_REDIRECTS" in environ or any(name in ("--redirects", "-r") for name in options):
        return False
    return options.get("--nproc-per-node", environ.get("PET_NPROC_PER_NODE", "1")) != "1"


def _is_on_one_node(options: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Whether a command of torchrun names neither nodes nor a rendezvous."""
    if any(name.startswith(_NODE_VARIABLES) for name in environ):
        return False
    named = [(name, value) for name, value in options.items() if name.startswith(_NODE_OPTIONS)]
    return all(name == "--nnodes" and value in _ONE_NODE for name, value in named)


def run_options(command: Program) -> list[str]:
    """Return the options without those for the environment."""
    options = [] if command.stop_signal == "SIGINT" else ["--stop-signal", command.stop_signal]
    options += ["--on-resume", shlex.join(command.on_resume)] if command.on_resume else []
    for option, values in (("--metrics", command.metrics), ("--parse", command.parse)):
        options += [part for value in values for part in (option, value)]
    return options


def environment_options(command: Program) -> list[str]:
    """Return the options `--env` of a command that keeps its environment: what it would not inherit, and what was
    set."""
    kept = command.environment.keys() - capture_environment(command.environment).keys() - {*command.expanded}
    settings = [*sorted(kept), *(f"{name}={command.environment[name]}" for name in command.expanded)]
    return [part for setting in settings for part in ("--env", setting)]
