"""Runs on other hosts: `gputrain run --on PLACE`, and HOST:RUN in the commands on runs.

A command on HOST:RUN is sent to the host. What it prints there is printed here, without control characters.
`engine.jobs.hosts.placement` starts runs.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from engine.base.errors import Problem, UsageError
from engine.base.exit_codes import CommandExit, ExitCode
from engine.base.text import printable
from engine.base.threads import in_background
from engine.jobs.hosts.channel import (
    NEEDS_GPUTRAIN,
    SSH_FAILED,
    HostUnreachableError,
    ask_gputrain,
    ask_on_terminal,
    check_host_name,
    remote_command,
    run_on,
    ssh_argv,
)
from engine.jobs.hosts.placement import RemoteRequest, start_on
from engine.jobs.hosts.reading import parse_run
from engine.jobs.hosts.watch import ASKS
from engine.jobs.launch.submission import JobOptions, print_script, submit_run, without_options
from engine.runs.batch.states import ENGINES as BATCH_SYSTEMS
from engine.runs.batch.states import is_batch_system
from engine.runs.root import runs_root
from engine.runs.run_row import RunRow
from tui.cli.console import exit_on_usage_error, print_error
from tui.cli.run_command import split_command
from tui.cli.terminal import is_on_terminal, plain_commands, require_terminal
from tui.screens.launcher import CALLED_HOST

if TYPE_CHECKING:
    from engine.jobs.launch.request import RunRequest
    from tui.cli.train import PlaceOptions, StartOptions

COMMANDS = frozenset({
    "attach", "compare", "logs", "resume", "stop", "wait",
    "runs checkpoint", "runs continue", "runs delete", "runs pause", "runs restore", "runs show",
})  # fmt: skip
"""The commands that take HOST:RUN."""
# A command on a run in a text, as in "`gputrain resume fashion-17` goes on".
_COMMAND_ON_RUN = re.compile(rf"(\bgputrain (?:{'|'.join(COMMANDS)}) )(?=[a-z0-9])")
T = TypeVar("T")
SCREEN_OPTIONS = ("--detach", "--headless")
PLACE_OPTIONS = ("--on", "--nodes", "--partition", "--slurm")
# The first of these with which a part of the command ends is the exit code.
WORST_CODES = (ExitCode.USAGE_ERROR, ExitCode.TIMED_OUT, ExitCode.FAILED, ExitCode.STOPPED)


def start_elsewhere(
    place: str,
    request: RunRequest,
    start: StartOptions,
    options: PlaceOptions,
    file: str | None,
    *,
    env: Sequence[str],
) -> None:
    """Start a run at a place and print it as HOST:RUN, that of a batch system as RUN. Exits with the code of the
    command there if that refuses it.

    `file` is the config as typed, and `env` are variables of a command. Raises UsageError if the run is refused
    here."""
    from engine.config.loader import presets

    for option, is_set in (("--json", start.as_json), ("--dry-run", request.dry_run)):
        if is_set:
            raise UsageError.one("--on", f"cannot be combined with {option}", code="conflict")
    if options.copy and is_batch_system(place):
        raise UsageError.one("--copy", "copies to a host; --snapshot keeps the code of a job", code="conflict")
    if request.problems:
        raise UsageError(request.problems)
    words, job = _without_place(sys.argv[2:]), JobOptions(options.nodes, options.partition, options.slurm or ())
    if not is_batch_system(place) and (options.print or job != JobOptions()):
        option = "--print" if options.print else "--nodes, --partition, --slurm"
        raise UsageError.one(option, f"is for a job: --on {' or '.join(BATCH_SYSTEMS)}", code="no-effect")
    if is_batch_system(place):
        _submit(place, request, words, job, prints=options.print)
        return
    remote = RemoteRequest(
        words=words,
        config=request.config,
        folder=Path.cwd(),
        runs_dir=runs_root(),
        notify=lambda sentence: typer.echo(printable(sentence), err=True),
        is_command=request.command is not None,
        files=[file] if file is not None and file not in presets() else [],
        environment={name: os.environ[name] for name in env if "=" not in name},
        copies=options.copy,
    )
    try:
        started = _with_questions(place, *[partial(start_on, place, remote)] * 2)
    except HostUnreachableError as error:
        print_error(Problem("", str(error), code=error.code))
        raise typer.Exit(CommandExit.FAILED if remote.is_command else ExitCode.FAILED) from error
    for line in started.messages:
        typer.echo(name_runs(started.host, line, f"{started.host}: "), err=True)
    if started.code:
        raise typer.Exit(started.code)
    typer.echo(f"{started.host}:{started.name}")


def _submit(engine: str, request: RunRequest, words: Sequence[str], job: JobOptions, *, prints: bool) -> None:
    """Submit a run, and print its name, or only print the script. Raises UsageError."""
    if prints:
        typer.echo(print_script(engine, request, words, job), nl=False)
        return
    name, message = submit_run(engine, request, words, job)
    typer.echo(message, err=True)
    typer.echo(name)


def _with_questions(host: str, act: Callable[[], T], act_again: Callable[[], T]) -> T:
    """Return what an action on a host returns. If ssh would ask for a password or a new host key, it does so on a
    terminal, and the second attempt shares that connection. Raises HostUnreachableError."""
    try:
        return act()
    except HostUnreachableError as error:
        if not is_on_terminal() or not any(words.decode() in str(error) for words in ASKS):
            raise
        if ask_on_terminal(host, stdout=sys.stderr) == SSH_FAILED:
            raise
    return act_again()


def _without_place(words: Sequence[str]) -> list[str]:
    """Return the words of `gputrain run` without those that say where and how it starts."""
    before, command = split_command(words)
    kept = without_options(before, ("--copy", "--print", *SCREEN_OPTIONS), PLACE_OPTIONS)
    return kept if command is None else [*kept, "--", *command]


# ---- HOST:RUN ----


def split_host(reference: str) -> tuple[str, str] | None:
    """Return host and run of HOST:RUN; None for a run of this host, also for a path with a colon."""
    host, _, run = reference.partition(":")
    if not run or "/" in host or os.path.lexists(reference):
        return None
    return check_host_name(host), run


def run_on_hosts(ctx: Any, words: Sequence[str], run_here: Callable[[], object]) -> bool:
    """Send a command on runs of other hosts there, and return whether that was all of it. Of runs on this host, too, it
    calls `run_here` with the others left out.

    `words` are those behind the name of the command. Exits with the worst code. Raises UsageError if the command cannot
    do that."""
    names: list[str] = ctx.params.get("runs") or [ctx.params["run"]]
    places = {name: place for name in names if (place := split_host(name)) is not None}
    command, here = ctx.command_path.partition(" ")[2] or "attach", [name for name in names if name not in places]
    runs = dict[str, list[str]]()
    for host, run in places.values():
        runs.setdefault(host, []).append(run)
    is_spread = len(runs) > 1 or bool(here)
    if not runs or (command == "compare" and is_spread):
        return False
    if command not in COMMANDS:
        [host, run] = next(iter(places.values()))
        line = shlex.join(["ssh", host, "gputrain", *command.split(), run])
        raise UsageError.one(f"{host}:{run}", f"{command} takes runs of this host; there: {line}", code="not-supported")
    if is_spread and command == "attach":
        reason = "the screen compares runs of one host; `gputrain compare` takes those of several"
        raise UsageError.one("attach", reason, code="not-supported")
    if is_spread and ctx.params.get("as_json"):
        raise UsageError.one(
            "--json", "prints the runs of one host; name those of each in a line", code="not-supported"
        )
    lines = {host: [*command.split(), *_words_for(host, words, places)] for host in runs}
    if command == "attach":
        [host] = runs
        _attach(host, lines[host], runs[host], names)
    sends = {host: partial(_send, host, lines[host], found, is_spread=is_spread) for host, found in runs.items()}
    sent = {host: in_background(send) for host, send in sends.items()}
    codes = list[int]()
    if here:
        ctx.params["runs"] = here
        try:
            with exit_on_usage_error():
                run_here()
            codes.append(0)
        except typer.Exit as end:
            codes.append(end.exit_code)
    for host, result in sent.items():
        try:
            codes.append(_with_questions(host, result.result, sends[host]))
        except HostUnreachableError as error:
            print_error(Problem("", str(error), code=error.code))
            codes.append(ExitCode.FAILED)
    raise typer.Exit(next((code for code in WORST_CODES if code in codes), max(codes)))


def _words_for(host: str, words: Sequence[str], places: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the words of a command for one host: its runs without the name of the host, and no run of another one."""
    return [places[word][1] if word in places else word for word in words if places.get(word, (host, ""))[0] == host]


def host_script(runs: Sequence[str]) -> str:
    """Return a line of a shell that runs `gputrain` with its arguments on a host, where these runs are.

    The runs folder is that of this shell, if the host has it, else that of the host, where the runs of copies are."""
    root, first = shlex.quote(str(runs_root())), shlex.quote(runs[0])
    parts = [
        f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null",
        'export GPUTRAIN_RUNS="${GPUTRAIN_RUNS:-$HOME/runs}"',
        f'[ -d {root} ] && {{ [ -e {root}/{first} ] || [ ! -e "$GPUTRAIN_RUNS"/{first} ]; }} && GPUTRAIN_RUNS={root}',
        NEEDS_GPUTRAIN,
        'exec gputrain "$@"',
    ]
    return "; ".join(parts)


def read_host_run(reference: str) -> RunRow | None:
    """Return what a comparison needs of HOST:RUN; None for a run of this host. Raises UsageError if the host does not
    tell it."""
    if (place := split_host(reference)) is None:
        return None
    host, run = place
    try:
        row = ask_gputrain(host, ["runs", "show", run, "--json"], parse_run, host_script([run]))
    except HostUnreachableError as error:
        raise UsageError.one("", str(error), code=error.code) from error
    assert isinstance(row, RunRow)  # noqa: S101 (of one run)
    # A command has parameters in place of a config.
    return row._replace(name=f"{host}:{row.name}", formats=("record",) if row.record.command else ())


def name_runs(host: str, line: str, prefix: str = "", runs: Sequence[str] = ()) -> str:
    """Return a line that a host has printed with HOST:RUN in place of names of its runs, which belong to commands or
    are one of `runs` at its beginning. A line without one there begins with the `prefix`."""
    named = _COMMAND_ON_RUN.sub(rf"\g<1>{host}:", line)
    return f"{host}:{named}" if named.partition(" ")[0].rstrip(":") in runs else prefix + named


def _attach(host: str, words: Sequence[str], runs: Sequence[str], names: Sequence[str]) -> None:
    """Replace this process by the screen of a host. Raises UsageError without a terminal."""
    require_terminal(*plain_commands(names, None))
    command = remote_command(words, f"export {CALLED_HOST}={host}; {host_script(runs)}", marks=False)
    argv = ssh_argv(host, command, terminal=True, ask=True)
    sys.stdout.flush()
    os.execvp(argv[0], argv)  # noqa: S606 (the user's ssh)


def _send(host: str, words: Sequence[str], runs: Sequence[str], *, is_spread: bool) -> int:
    """Run a command on a host, print what it prints, and return its exit code. Raises HostUnreachableError, and OSError
    if nobody reads stdout."""
    prefixes = ["", f"{host}: " if is_spread else "", f"{host}: "]
    if words[0] == "resume":
        words = ["resume", "--detach", *(word for word in words[1:] if word not in SCREEN_OPTIONS)]
        prefixes[1] = f"{host}:"
    is_data = words[0] == "logs" or "--json" in words

    def show(line: bytes, stream: int) -> None:
        text = "\t".join(map(printable, line.decode(errors="replace").split("\t")))
        is_named = stream == 2 or not is_data
        text = name_runs(host, text, prefixes[stream], runs) if is_named else prefixes[stream] + text
        print(text, file=sys.stdout if stream == 1 else sys.stderr, flush=True)

    columns = f"export COLUMNS={shutil.get_terminal_size().columns}; " if sys.stdout.isatty() else ""
    return run_on(host, words, columns + host_script(runs), timeout_s=math.inf, show=show).code
