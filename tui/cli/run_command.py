"""`gputrain run [OPTIONS] -- COMMAND…`: the words of the command, the options that only a command has, and its request.

What precedes `--` is that of `gputrain run`, see `tui.cli.train`. What follows it is never parsed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.utils.errors import Problem, UsageError, raise_if_any
from engine.utils.exit_codes import CommandExit, ExitCode
from tui.cli.command import Callback, expand_parameter
from tui.cli.config_flags import FlagOverrides
from tui.cli.console import exit_on_usage_error, print_warning
from tui.cli.help import HelpCommand, guard_minus_words

if TYPE_CHECKING:
    from engine.command.spec import Command
    from engine.launch.request import RunRequest
    from engine.runs.folder import RunFolder
COMMAND_PANEL = "Command options"
# Config keys that have an effect on a command, besides the sections queue and notify.
COMMAND_KEYS = frozenset({"run.name", "run.resume", "run.max_restarts", "device.gpus", "device.wait"})
COMMAND_SECTIONS = ("queue.", "notify.")
# Of what a stored command would run, in an error.
MAX_SHOWN_CHARS, MAX_VARIABLE_CHARS, MAX_SHOWN_VARIABLES = 4000, 200, 100
PROGRAM_ENDINGS = (".py", ".sh", ".bash", ".pl", ".rb", ".r", ".R", ".jl")
CONFIG_ENDINGS = (".yaml", ".yml")
EXIT_CODES = {"command-not-executable": CommandExit.NOT_EXECUTABLE, "command-not-found": CommandExit.NOT_FOUND}
"""Exit codes by the codes of problems; any other is 125."""


@dataclass(frozen=True)
class CommandOptions:
    """The options that only a command has."""

    cwd: str | None = None
    env: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    stop_signal: str = "INT"
    gpu_ids: Literal["index", "uuid"] = "index"
    no_tty: bool = False
    no_slurm_env: bool = False
    metrics: tuple[str, ...] = ()
    parse: tuple[str, ...] = ()
    try_parse: str | None = None


def takes_command(function: Callback) -> Callback:
    """Replace the parameters `words`, those of the command or None, and `options: CommandOptions`."""

    def option(name: str, help_text: str, metavar: str | None = None) -> Any:
        return typer.Option(name, help=help_text, metavar=metavar, rich_help_panel=COMMAND_PANEL)

    many = list[str] | None
    parameters: dict[str, tuple[Any, Any]] = {
        "cwd": (Annotated[str | None, option("--cwd", "Working folder of the command.", "DIR")], None),
        "env": (
            Annotated[many, option("--env", "Set a variable, or keep NAME of this shell.", "KEY=VALUE|NAME")], None
        ),
        "tag": (Annotated[many, option("--tag", "Put a tag on the run.", "TAG")], None),
        "stop_signal": (Annotated[str, option("--stop-signal", "What asks the command to stop.", "SIGNAL")], "INT"),
        "gpu_ids": (
            Annotated[
                Literal["index", "uuid"], option("--gpu-ids", "How CUDA_VISIBLE_DEVICES names the GPUs: index or uuid.")
            ],
            "index",
        ),
        "no_tty": (Annotated[bool, option("--no-tty", "Give the command pipes in place of a terminal.")], False),
        "no_slurm_env": (
            Annotated[bool, option("--no-slurm-env", "Hide the SLURM variables from the command.")], False
        ),
        "metrics": (
            Annotated[many, option("--metrics", "Where its metric files are [default: below --cwd]", "PATH")], None
        ),
        "parse": (
            Annotated[
                many,
                option("--parse", "Find metrics in the output: 'loss[=: ]+(?P<loss>[0-9.eE+-]+)'.", "REGEX"),
            ],
            None,
        ),
        "try_parse": (
            Annotated[str | None, option("--try-parse", "Show what is found in FILE, and run nothing.", "FILE")], None
        ),
    }  # fmt: skip

    def combine(values: dict[str, Any]) -> CommandOptions:
        for name in ("env", "tag", "metrics", "parse"):
            values[name] = tuple(values[name] or ())
        return CommandOptions(**values)

    with_options = expand_parameter(function, "options", parameters, combine)

    def words(_: dict[str, Any]) -> Sequence[str] | None:
        context = typer_context()
        found: Sequence[str] | None = context.meta.get(RunCommand.WORDS)
        return found

    return expand_parameter(with_options, "words", {}, words)


def typer_context() -> Any:
    """Return the context of the command that runs."""
    from typer._click.globals import get_current_context

    return get_current_context()


class RunCommand(HelpCommand):
    """`gputrain run`, whose exit codes with a command are those of env(1)."""

    WORDS = "gputrain.command"
    """Key of the words of the command in the context."""

    def make_context(self, info_name: Any, args: list[str], *arguments: Any, **extra: Any) -> Any:
        is_command = "--" in args
        try:
            return super().make_context(info_name, args, *arguments, **extra)
        except typer.Exit as end:
            raise _as_command_exit(end, is_command=is_command) from end

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before, words = split_command(args)
        ctx.meta[self.WORDS] = words
        if not ctx.resilient_parsing:
            with exit_on_usage_error():
                if words is None:
                    check_config_word(self, before)
                elif not words:
                    raise UsageError.one(
                        "--", "no command follows; type one, as in -- python train.py", code="missing-value"
                    )
        return super().parse_args(ctx, before)

    def trains(self, ctx: Any) -> bool:
        return super().trains(ctx) and ctx.meta[self.WORDS] is None and ctx.params.get("try_parse") is None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit as end:
            raise _as_command_exit(end, is_command=ctx.meta[self.WORDS] is not None) from end


def _as_command_exit(end: Any, *, is_command: bool) -> Any:
    """Return the exit of a refused command with its own code."""
    if not is_command or end.exit_code != ExitCode.USAGE_ERROR:
        return end
    problems = end.__cause__.problems if isinstance(end.__cause__, UsageError) else []
    return typer.Exit(next((EXIT_CODES[each.code] for each in problems if each.code in EXIT_CODES), CommandExit.FAILED))


def split_command(args: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments before the first `--`, and those behind it; None without one."""
    if "--" not in args:
        return [*args], None
    place = [*args].index("--")
    return [*args[:place]], [*args[place + 1 :]]


def check_config_word(command: Any, args: Sequence[str]) -> None:
    """Raise UsageError if the first word of `gputrain run` is a program and no config, with the line to type."""
    words = [word for word in guard_minus_words(command, args)[1] if "=" not in word.partition("/")[0]]
    if not words or not is_program(words[0]):
        return
    place = [*args].index(words[0])
    typed = [*args[place:]]
    if words[0].endswith(".py") and not os.access(words[0], os.X_OK):
        typed.insert(0, "python")
    line = shlex.join(["gputrain", "run", *args[:place], "--", *typed])
    raise UsageError.one(words[0], f"is a program and no config; to run it: {line}", code="not-a-config")


def is_program(word: str) -> bool:
    """Whether a word that stands for a config names a script or another program."""
    from engine.config.loader import presets

    path = PurePath(word)
    if path.suffix in CONFIG_ENDINGS or word in presets():
        return False
    if path.suffix in PROGRAM_ENDINGS:
        return True
    if Path(word).is_file():
        return os.access(word, os.X_OK)
    return not Path(word).exists() and shutil.which(word) is not None


def with_command(
    request: RunRequest, words: Sequence[str] | None, options: CommandOptions, flags: FlagOverrides, file: str | None
) -> RunRequest:
    """Return a request to run the words of a command, None for a training. Raises UsageError."""
    request = replace(request, tags=options.tag)
    if words is None:
        if (option := _first_set(options)) is not None:
            raise UsageError.one(option, "is for a command: gputrain run … -- COMMAND", code="conflict")
        return request
    if file is not None:
        raise UsageError.one(file, "is a config beside the command behind `--`; keep one of them", code="conflict")
    if request.dry_run:
        raise UsageError.one("--dry-run", "is for trainings; a command has no plan to print", code="conflict")
    check_keys(request, flags)
    return replace(
        request,
        command=make_command(words, options),
        default_name=command_stem(words),
        warnings=(),
    )


def stored_command(folder: RunFolder, *, trust_code: bool) -> Command:
    """Return the command of a run that is resumed. Raises UsageError unless this user wrote it or trusts it."""
    from engine.command.spec import foreign_command_reason, read_command

    command = read_command(folder)
    file_reason, folder_reason = foreign_command_reason(folder), folder.foreign_reason()
    reason = (
        f"{folder.command.name} {file_reason}" if file_reason else f"the run {folder_reason}" if folder_reason else ""
    )
    if not reason:
        return command
    for line in describe_command(command, os.environ):
        typer.echo(line, err=True)
    if not trust_code:
        advice = "run it anyway with --trust-code"
        raise UsageError([Problem(folder.name, f"its command does not run: {reason}", advice, code="untrusted-code")])
    print_warning(Problem("", f"--trust-code: runs this command, although {reason}", code="untrusted-code"))
    return command


def describe_command(command: Command, own: Mapping[str, str]) -> Iterator[str]:
    """Yield lines that tell what a stored command would run, compared with the environment `own` of this shell."""
    from engine.utils.redaction import redact
    from engine.utils.text import printable

    def bound(text: str, max_chars: int) -> str:
        text, more = printable(text[:max_chars]), len(text) - max_chars
        return f"{text} … and {more} characters more" if more > 0 else text

    yield f"command: {bound(shlex.join(command.argv), MAX_SHOWN_CHARS)}"
    yield f"folder: {bound(command.cwd, MAX_SHOWN_CHARS)}"
    yield f"stop signal: {command.stop_signal}"
    others = [(name, value) for name, value in command.environment.items() if own.get(name) != value]
    for name, value in others[:MAX_SHOWN_VARIABLES]:
        yield f"variable: {bound(f'{name}={redact(name, value)}', MAX_VARIABLE_CHARS)}"
    if len(others) > MAX_SHOWN_VARIABLES:
        yield f"and {len(others) - MAX_SHOWN_VARIABLES} more variables that this shell does not have"


def _first_set(options: CommandOptions) -> str | None:
    """Return the first option that only a command has and that is set."""
    default = CommandOptions(tag=options.tag)
    changed = (name for name in vars(default) if getattr(options, name) != getattr(default, name))
    return next((f"--{name.replace('_', '-')}" for name in changed), None)


def check_keys(request: RunRequest, flags: FlagOverrides) -> None:
    """Raise UsageError for what was typed for a training, which a command does not have."""
    typed = sorted(key for key in request.typed if key not in COMMAND_KEYS and not key.startswith(COMMAND_SECTIONS))
    advice = "an option of the command follows its name behind `--`"
    raise_if_any(
        [
            Problem(flags[key][0] if key in flags else key, "sets a training of gputrain", advice, code="no-effect")
            for key in typed
        ]
    )


def make_command(words: Sequence[str], options: CommandOptions) -> Command:
    """Return what a typed line starts. Raises UsageError."""
    from engine.command.environment import capture_environment
    from engine.command.spec import Command
    from engine.utils.files import expand_user, file_number

    cwd = Path.cwd() if options.cwd is None else expand_user(options.cwd).absolute()
    try:
        inode = file_number(cwd.stat().st_ino)
    except OSError as error:
        raise UsageError.one("--cwd", f"{cwd} cannot be used: {error.strerror}", code="not-found") from error
    return Command(
        argv=tuple(words),
        cwd=str(cwd),
        cwd_inode=inode,
        environment=capture_environment(os.environ, options.env, slurm=not options.no_slurm_env),
        expanded=tuple(setting.partition("=")[0] for setting in options.env if "=" in setting),
        stop_signal=_signal_name(options.stop_signal),
        tty=not options.no_tty,
        gpu_ids=options.gpu_ids,
        parse=options.parse,
        metrics=options.metrics,
    )


def _signal_name(text: str) -> str:
    """Return the name of a signal that is typed as INT, SIGINT or 2. Raises UsageError."""
    from engine.command.spec import STOP_SIGNALS

    name = text.upper()
    if name.isdecimal() and int(name) in {int(each) for each in signal.Signals}:
        return signal.Signals(int(name)).name
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in STOP_SIGNALS:
        raise UsageError.one(
            "--stop-signal", f"{text} cannot ask to stop; type INT, TERM, USR1 …", code="invalid-value"
        )
    return name


def command_stem(words: Sequence[str]) -> str:
    """Return the beginning of the name of a run: that of the script, the module or the program."""
    from engine.command.inner_commands import inner_commands
    from engine.config.run_name import name_from_stem

    commands = inner_commands(words)
    names = (each.script or (each.module.rpartition(".")[2] if not each.is_launcher else "") for each in commands)
    name = next(filter(None, names), commands[0].program or words[0])
    return name_from_stem(PurePath(name).stem)


def show_try_parse(options: CommandOptions, *, as_json: bool) -> None:
    """Print which metrics `--parse` and the patterns of gputrain find in a file. Raises UsageError."""
    from dataclasses import asdict

    from engine.command.try_parse import try_parse
    from engine.utils.codec import finite
    from engine.utils.text import pluralize, printable
    from tui.cli.console import print_table
    from tui.tables.tried_metrics import TRIED_COLUMNS

    tried = try_parse(Path(str(options.try_parse)), options.parse)
    if as_json:
        metrics = {name: asdict(each) | {"last": finite(each.last)} for name, each in tried.metrics.items()}
        counts = {"lines": tried.num_lines, "lines_used": tried.num_used}
        typer.echo(json.dumps({"format": 1, "metrics": metrics, **counts, "problem": tried.problem}, indent=2))
        return
    if tried.metrics:
        print_table(TRIED_COLUMNS, list(tried.metrics.items()))
    typer.echo(f"{tried.num_used:,} of {pluralize(tried.num_lines, 'line')} have metrics", err=True)
    if tried.problem is not None:
        typer.echo(f"warning: {printable(tried.problem)}", err=True)
