"""`gputrain run`: train a config or run a command, in the foreground, in the background or on the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.text import printable
from engine.config.run_name import name_from_stem, run_stem, stem_of_numbered
from engine.config.user_errors import code_root
from engine.jobs.command.terminal import input_of_gputrain
from engine.runs.folder import RunFolder
from engine.runs.root import is_run_folder, runs_root
from engine.train.distributed.rank_env import detect_launcher
from tui.cli.command import command, takes
from tui.cli.config_arguments import (
    ConfigArguments,
    FlagOverrides,
    code_trust,
    config_flags,
    resolve_arguments,
    split_arguments,
    trust_option,
)
from tui.cli.console import print_warning
from tui.cli.options import (
    DetachOption,
    RunsDirOption,
    TrustCodeOption,
    TrustOwnerOption,
    dry_run_option,
)
from tui.cli.resume_command import describe_command
from tui.cli.run_command import (
    CommandOptions,
    RunCommand,
    split_command,
    takes_words,
    with_command,
)
from tui.cli.run_options import announce_watch
from tui.cli.terminal import is_on_terminal, moves_cursor

if TYPE_CHECKING:
    from engine.config.loader import ResolvedConfig
    from engine.jobs.command.spec import Program
    from engine.jobs.launch.request import RunRequest

EXIT_CODES = {
    0: "finished, screen closed, or started with --detach",
    3: "stopped on request; gputrain resume continues it",
}


@dataclass(frozen=True)
class StartOptions:
    """How a run starts: in the background or on a terminal, in which folder, and what it may use."""

    headless: Annotated[bool, typer.Option("--headless", help="Run without a screen; print progress to stderr.")] = (
        False
    )
    detach: DetachOption = False
    detached: Annotated[bool, typer.Option("--detached", hidden=True)] = False
    """Set by --detach for the command that it starts."""
    runs_dir: RunsDirOption = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one event per line; implies --headless.")] = False
    trust_owner: TrustOwnerOption = False
    trust_code: TrustCodeOption = False


@dataclass(frozen=True)
class PlaceOptions:
    """Where a run starts, if not on this host, and what its job asks of a batch system."""

    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="HOST",
            help="Start it on HOST over ssh; any or any:HOST,HOST: where GPUs are free; slurm, ray:HOST:8265: as a "
            "job.",
        ),
    ] = None
    copy: Annotated[
        bool, typer.Option("--copy", help="With --on: send the code to a host without this folder, as --snapshot.")
    ] = False
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, help="As a job: nodes, each with --ngpu GPUs.")
    ] = 1
    partition: Annotated[
        str,
        typer.Option("--partition", metavar="NAME", help="With --on slurm: partition [default: of settings.yaml]"),
    ] = ""
    slurm: Annotated[
        list[str] | None,
        typer.Option("--slurm", metavar="OPTION", help="With --on slurm: of sbatch, as --slurm=--account=x; repeat."),
    ] = None
    print: Annotated[bool, typer.Option("--print", help="As a job: print the script; submit nothing.")] = False


@command(
    [
        "gputrain run digits --epochs 5",
        "gputrain run --data-path photos/ --scheduler cosine --epochs 30",
        "gputrain run flowers.yaml --gpus 0,1 --amp bf16 optim.weight_decay=5e-4",
        "gputrain run flowers.yaml --gpus free:2 --queue --detach",
        "gputrain run --gpus free:1 -- python train.py --lr 0.1",
        "gputrain run --gpus free:2 -- torchrun --nproc-per-node {gpus} train.py",
        "gputrain run --on any:lab1,lab2 --ngpu 2 flowers.yaml",
        "gputrain run --on slurm --ngpu 4 --nodes 2 --time-limit 8h flowers.yaml",
        "gputrain run --on ray:head:8265 --ngpu 4 --nodes 2 flowers.yaml",
    ],
    "[KEY=DEFAULT] is the config key of an option: gputrain config describe KEY.",
    "With --on, a run starts on HOST in the background, in this folder if both hosts share it. Its name is printed as "
    "HOST:RUN, which attach, compare, logs, resume, stop, wait and runs show take. A command there has the environment "
    "of a command over ssh, the PATH of this virtual environment, and --env.",
    "With --on slurm, a job starts the run in this folder, with the environment of this shell, and continues it after "
    "its --time-limit. A COMMAND with {nodes} (their number), {head} (the first one) or {port} runs on each node, any "
    "other one on the first node.",
    "With --on ray:ADDRESS, the address of a dashboard, a job runs in this folder, too. Each rank of a training is a "
    "worker of Ray Train. If Ray loses one, the run continues from its newest checkpoint. A COMMAND runs on one node.",
    "In COMMAND, {gpus} is the number of its GPUs, {ids} and {uuids} are the GPUs, {run} and {folder} are name and "
    "folder of the run. The exit code is that of COMMAND, or 125 (gputrain failed), 126 (not executable), 127 (not "
    "found).",
    exit_codes=EXIT_CODES,
    kind=RunCommand,
)
@config_flags()
@takes("start", StartOptions)
@takes("place", PlaceOptions)
@takes("options", CommandOptions)
@takes_words
def run(
    *,
    arguments: ConfigArguments = None,
    flags: FlagOverrides,
    start: StartOptions,
    words: Sequence[str] | None,
    options: CommandOptions,
    place: PlaceOptions,
    dry_run: Annotated[bool, dry_run_option(" and train one batch per rank; keep no files.")] = False,
) -> None:
    """Train an image classifier, or run any other program.

    The screen shows the run; closing it does not stop the run. Without a terminal, or with --headless, the run stays in
    the foreground: Ctrl-C saves a checkpoint and stops it, a second Ctrl-C kills it.
    """
    if options.try_parse is not None:
        from tui.cli.try_parse import show_try_parse

        show_try_parse(options, as_json=start.as_json)
        return
    file, _ = split_arguments(arguments)
    request = build_request(
        lambda: resolve_arguments(arguments, flags, trust_code=start.trust_code), start, base=file, dry_run=dry_run
    )
    request = with_command(request, words, options, flags, file)
    if place == PlaceOptions(slurm=place.slurm) and not place.slurm:
        start_run(request, start)
        return
    from tui.cli.host_runs import start_elsewhere

    if place.on is None:
        option = "--copy" if place.copy else "--nodes, --partition, --slurm and --print"
        raise UsageError.one(option, "name the place with --on", code="missing-value")
    start_elsewhere(place.on, request, start, place, file, env=options.env)


def start_run(request: RunRequest, start: StartOptions) -> None:
    """Start a run in the background, on the screen or in the foreground. Raises UsageError if it is refused."""
    if start.detach and (start.as_json or request.dry_run):
        other = "--json" if start.as_json else "--dry-run"
        raise UsageError.one("--detach", f"cannot be combined with {other}", code="conflict")
    if request.dry_run:
        check_snapshot(request)
        if request.command is not None:
            print_command(request, request.command)
            return
    request = with_unread_input(request, start)
    if start.detach:
        start_in_background(request, sys.argv[1:], start.runs_dir)
    elif should_open_screen(request, headless=start.headless or start.as_json or request.dry_run):
        run_with_screen(request, sys.argv[1:], start.runs_dir)
    else:
        run_headless(request, as_json=start.as_json)


def with_unread_input(request: RunRequest, start: StartOptions) -> RunRequest:
    """Return the request of a command with a warning if it does not get the pipe or file that is our stdin."""
    if request.command is None or not (start.detach or request.config.waits) or input_of_gputrain() is None:
        return request
    reason = "is not passed on to a command in the background or in the queue: it reads /dev/null"
    advice = "start it without --detach and --queue, or let it read a file by its name"
    return replace(request, warnings=(*request.warnings, Problem("stdin", reason, advice, code="no-effect")))


def check_snapshot(request: RunRequest) -> None:
    """Raise UsageError if a new run is to keep a copy of code that is outside of git."""
    run = request.config.run
    if not run.snapshot or run.resume:
        return
    from engine.config.user_code import user_code_names
    from engine.jobs.code.record import require_repository

    if request.command is not None:
        require_repository(Path(request.command.cwd))
    elif user_code_names(request.config):
        require_repository(code_root(run.code))


def print_command(request: RunRequest, command: Program) -> None:
    """Print what a command is and where it runs. Raises UsageError if it is refused."""
    raise_problems(request)
    for line in describe_command(command, os.environ):
        typer.echo(line)


def should_open_screen(request: RunRequest | None = None, *, headless: bool) -> bool:
    """Return whether to open the screen: on a terminal that can draw it, unless torchrun or srun started this rank."""
    if headless or not (is_on_terminal() and moves_cursor()):
        return False
    is_command = request is not None and request.command is not None
    return is_command or detect_launcher("auto", os.environ) == "spawn"


def start_in_background(request: RunRequest, arguments: list[str], runs_dir: str | None) -> None:
    """Start the same command without a terminal, and print the name of the run once it has its folder.

    Exits with the code of the command if it refuses the request. Raises UsageError if the config is invalid."""
    from engine.jobs.launch.detached import wait_until_queued
    from engine.jobs.queue.listing import RowState, find_row
    from tui.screens.launcher import launch_run

    if request.command is None and detect_launcher(request.config.device.launcher, os.environ) != "spawn":
        raise UsageError.one(
            "--detach",
            "is not available under torchrun and srun, which start the ranks themselves",
            code="not-supported",
        )
    raise_problems(request)
    request.code_trust.check(request.config)
    before, command = split_command(arguments[1:])
    rest = [argument for argument in before if argument not in ("--detach", "--headless")]
    rest += [] if command is None else ["--", *command]
    launched = launch_run([arguments[0], "--headless", "--detached", *rest], runs_root(runs_dir))
    for warning in (*([launched.warning] if launched.warning is not None else []), *request.warnings):
        print_warning(warning)
    if request.config.run.resume:
        # That command does it, but its output is shown only if it refuses the request.
        announce_watch([RunFolder(request.runs_dir / str(request.config.run.name))])
    try:
        folder = wait_until_queued(launched)
    except KeyboardInterrupt:
        launched.process.terminate()
        raise typer.Exit(130) from None
    if folder is None:
        for line in launched.output_lines():
            typer.echo(printable(line), err=True)
        raise typer.Exit(launched.process.wait())
    typer.echo(folder.name)
    if (row := find_row(folder)) is not None and row.state in (RowState.HELD, RowState.LIMITED):
        typer.echo(f"{row.name} waits: {printable(row.reason)}", err=True)


def run_with_screen(request: RunRequest, arguments: list[str], runs_dir: str | None) -> None:
    """Start the same command headless in its own session, then open the screen on it.

    Raises UsageError if the request is refused."""
    raise_problems(request)
    # The preflight of the started command checks it too, but the screen would hide what --trust-code reports.
    request.code_trust.check(request.config)
    from tui.cli.open_tui import open_screen
    from tui.screens.launcher import launch_run

    # Insert the flag right after the command name: after a `--` it would be an argument.
    launched = launch_run([arguments[0], "--headless", *arguments[1:]], runs_root(runs_dir))
    open_screen(runs_dir, first=lambda app: app.show_launch(launched))


def build_request(
    resolve: Callable[[], ResolvedConfig],
    start: StartOptions,
    *,
    stem: str | None = None,
    base: str | None = None,
    dry_run: bool = False,
) -> RunRequest:
    """Return the request to run a config. Unless the config names its run, `stem` does, else `base`, the config as
    typed, or the data folder.

    The preflight reports the problems of an invalid config together with its own.
    Raises UsageError if the config cannot be read.
    """
    from engine.config.loader import ConfigError
    from engine.jobs.launch.request import RunRequest

    problems: tuple[Problem, ...] = ()
    typed = frozenset[str]()
    warnings: tuple[Problem, ...] = ()
    trust, root = trust_option(granted=start.trust_code), runs_root(start.runs_dir)
    try:
        resolved = resolve()
        config, trust = resolved.config, code_trust(resolved, granted=start.trust_code)
        typed, warnings = resolved.typed, tuple(part.warning for part in resolved.no_effect)
        if repeats_stored_run(resolved, root):
            # `claim_run` gives it the next free number.
            stem = stem_of_numbered(str(config.run.name))
            config = config.model_copy(update={"run": config.run.model_copy(update={"name": None})})
    except ConfigError as error:
        config, problems = error.valid_part, tuple(error.problems)
    name = name_from_stem(stem) if stem else run_stem(base, config, typed)
    return RunRequest(
        config,
        root,
        name,
        dry_run,
        problems=problems,
        trust_owner=start.trust_owner,
        code_trust=trust,
        detached=start.detached,
        typed=typed,
        warnings=warnings,
    )


def repeats_stored_run(resolved: ResolvedConfig, root: Path) -> bool:
    """Return whether a config has its name, which is in use, from the config that a run folder stores, and does not
    resume that run."""

    run, source = resolved.config.run, Path(resolved.sources["run.name"])
    if run.name is None or run.resume or run.requeue or "run.name" in resolved.typed:
        return False
    is_stored = is_run_folder(source.parent) and source == RunFolder(source.parent).config
    return is_stored and (root / run.name).exists()


def raise_problems(request: RunRequest) -> None:
    """Raise UsageError, with all problems of the preflight, if the config of a request is invalid."""
    if (command := request.command) is not None:
        from engine.jobs.launch.command_checks import find_command_problems

        raise_if_any(find_command_problems(request, command))
    elif request.problems:
        from engine.jobs.launch.preflight import find_problems

        raise UsageError(find_problems(request))


def run_headless(request: RunRequest, *, as_json: bool) -> None:
    """Carry out a request in the foreground and exit with the exit code of the run. Raises UsageError."""
    from engine.jobs.launch.launcher import launch
    from tui.cli.progress import BackgroundPrinter, make_printer

    printer = BackgroundPrinter(make_printer(json=as_json, dry_run=request.dry_run))
    try:
        code = launch(request, printer)
    finally:
        printer.close()
    # A regular exit takes a second with torch loaded and blocks on a pipe whose reader has stopped reading.
    os._exit(code)
