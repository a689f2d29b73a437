"""`gputrain run [OPTIONS] -- COMMAND…`: the words of the command, the options that only a command has, and its request.

What precedes `--` is that of `gputrain run`, see `tui.cli.train`. What follows it is never parsed.
"""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.base.errors import Problem, UsageError, file_errors, raise_if_any
from engine.base.exit_codes import CommandExit, ExitCode
from engine.base.files import expand_user, file_number
from engine.config.run_name import name_from_stem
from engine.jobs.command.inner_commands import SCRIPT_ENDINGS, ends_with_shell_line, typed_command
from tui.cli.command import Callback, expand_parameter
from tui.cli.config_arguments import FlagOverrides
from tui.cli.console import exit_on_usage_error
from tui.cli.help import HelpCommand, guard_minus_words
from tui.cli.help_page import COMMAND_OPTIONS, CONFIG_OPTIONS
from tui.form.flags import FLAG_TO_KEY

if TYPE_CHECKING:
    from engine.jobs.command.spec import Program
    from engine.jobs.launch.request import RunRequest

TRAINING_OPTIONS = "Options of a training"
QUEUE_OPTIONS = "Options of the queue, described by gputrain config describe queue"
# Config keys that have an effect on a command, besides the sections queue and notify.
COMMAND_KEYS = frozenset({
    "run.name", "run.resume", "run.max_restarts", "run.requeue", "run.snapshot", "device.gpus", "device.wait",
})  # fmt: skip
COMMAND_SECTIONS = ("queue.", "notify.")
# Options of a shared key that have no key of their own.
SHARED_FLAGS = frozenset({"ngpu", "after_any"})
CONFIG_ENDINGS = (".yaml", ".yml")
# Options that a training has by another name.
SIMILAR = {"metrics": "use eval.metrics=module:name"}
EXIT_CODES = {"command-not-executable": CommandExit.NOT_EXECUTABLE, "command-not-found": CommandExit.NOT_FOUND}
"""Exit codes by the codes of problems; any other is 125."""


def _option(name: str, help_text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=help_text, metavar=metavar, rich_help_panel=COMMAND_OPTIONS)


@dataclass(frozen=True)
class CommandOptions:
    """The options that only a command has."""

    cwd: Annotated[str | None, _option("--cwd", "Working folder [default: this one]", "DIR")] = None
    env: Annotated[list[str], _option("--env", "Set a variable, or take NAME from this shell.", "KEY=VALUE|NAME")] = (
        field(default_factory=list)
    )
    tag: Annotated[list[str], _option("--tag", "Tag of the run; repeat for more.", "TAG")] = field(default_factory=list)
    stop_signal: Annotated[str, _option("--stop-signal", "Signal that asks the command to stop.", "SIGNAL")] = "INT"
    metrics: Annotated[
        list[str], _option("--metrics", "File or folder with metrics [default: below --cwd]", "PATH")
    ] = field(default_factory=list)
    parse: Annotated[list[str], _option("--parse", "Also find metrics in the output: (?P<NAME>...).", "REGEX")] = field(
        default_factory=list
    )
    on_resume: Annotated[
        str | None, _option("--on-resume", "Arguments to add on resume, such as '--resume auto'.", "ARGS")
    ] = None
    try_parse: Annotated[
        str | None, _option("--try-parse", "Print the metrics found in FILE; run nothing.", "FILE")
    ] = None


def takes_words(function: Callback) -> Callback:
    """Replace the parameter `words` by those of the command behind `--`; None without one."""

    def words(values: dict[str, Any]) -> Sequence[str] | None:
        found: Sequence[str] | None = values["context"].meta.get(WordsCommand.WORDS)
        return found

    return expand_parameter(function, "words", {"context": (typer.Context, inspect.Parameter.empty)}, words)


class WordsCommand(HelpCommand):
    """A command that may have the command of another program behind `--`, which needs no torch."""

    WORDS = "gputrain.command"
    """Key of the words of the command in the context."""
    core_advice = "any other program runs without it: gputrain run -- COMMAND"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before, words = split_command(args)
        ctx.meta[self.WORDS] = words
        if not ctx.resilient_parsing:
            with exit_on_usage_error():
                if words is None:
                    self.check_config(before)
                elif not words or not words[0]:
                    reason = "the command is empty" if words else "no command follows"
                    raise UsageError.one("--", f"{reason}; type one, as in -- python train.py", code="missing-value")
        return super().parse_args(ctx, before)

    def check_config(self, args: Sequence[str]) -> None:
        """Check the arguments of a line without a command. Raises UsageError."""

    def trains(self, ctx: Any) -> bool:
        return super().trains(ctx) and ctx.meta[self.WORDS] is None


class RunCommand(WordsCommand):
    """`gputrain run`, whose exit codes with a command are those of env(1)."""

    def make_context(self, info_name: Any, args: list[str], *arguments: Any, **extra: Any) -> Any:
        is_command = "--" in args
        with _exit_codes_of_command(lambda: is_command):
            return super().make_context(info_name, args, *arguments, **extra)

    def check_config(self, args: Sequence[str]) -> None:
        check_config_word(self, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        super().format_usage(ctx, formatter)
        formatter.write_usage(ctx.command_path, "[OPTIONS] -- COMMAND...", prefix=" " * len("Usage: "))

    def panel_of(self, param: Any) -> str:
        panel = super().panel_of(param)
        if panel != CONFIG_OPTIONS:
            return panel
        is_shared = param.name in SHARED_FLAGS or is_command_key(FLAG_TO_KEY.get(param.name, ""))
        return "Options" if is_shared else TRAINING_OPTIONS

    def named_in(self, param: Any) -> str | None:
        is_queue = param.name == "after_any" or FLAG_TO_KEY.get(param.name, "").startswith("queue.")
        return QUEUE_OPTIONS if is_queue else None

    @property
    def panels(self) -> tuple[str, ...]:
        return ("Arguments", TRAINING_OPTIONS, "Options", COMMAND_OPTIONS)

    def trains(self, ctx: Any) -> bool:
        return super().trains(ctx) and ctx.params.get("try_parse") is None and ctx.params.get("on") is None

    def invoke(self, ctx: Any) -> Any:
        with _exit_codes_of_command(lambda: ctx.meta[self.WORDS] is not None):
            return super().invoke(ctx)


class ResumeCommand(HelpCommand):
    """`gputrain resume`, whose exit codes for a command are those of `gputrain run -- COMMAND`."""

    IS_COMMAND = "gputrain.is_command"
    """Key of whether the run is that of a command, in the context."""

    def invoke(self, ctx: Any) -> Any:
        with _exit_codes_of_command(lambda: ctx.meta.get(self.IS_COMMAND, False)):
            return super().invoke(ctx)


@contextmanager
def _exit_codes_of_command(is_command: Callable[[], bool]) -> Iterator[None]:
    """Exit with a code of its own where a command is refused."""
    try:
        yield
    except typer.Exit as end:
        if not is_command() or end.exit_code != ExitCode.USAGE_ERROR:
            raise
        problems = end.__cause__.problems if isinstance(end.__cause__, UsageError) else []
        codes = (EXIT_CODES[each.code] for each in problems if each.code in EXIT_CODES)
        raise typer.Exit(next(codes, CommandExit.FAILED)) from end


def split_command(args: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments before the first `--`, and those behind it; None without one."""
    if "--" not in args:
        return [*args], None
    place = [*args].index("--")
    return [*args[:place]], [*args[place + 1 :]]


def check_config_word(command: Any, args: Sequence[str]) -> None:
    """Raise UsageError if the first word of `gputrain run` is a program and no config, with the line to type."""
    from engine.jobs.launch.command_checks import INTERPRETERS

    words = [word for word in guard_minus_words(command, args)[1] if "=" not in word.partition("/")[0]]
    if not words or not is_program(words[0]):
        return
    place, interpreter = [*args].index(words[0]), INTERPRETERS.get(PurePath(words[0]).suffix)
    typed = [*args[place:]]
    if interpreter is not None and not os.access(words[0], os.X_OK):
        typed.insert(0, interpreter)
    line = shlex.join(["gputrain", "run", *args[:place], "--", *typed])
    if interpreter is not None and not Path(words[0]).exists():
        raise UsageError.one(words[0], "there is no such file", f"a script runs with {line}", code="not-found")
    reason = f"is a program and no config; to run it, with options of gputrain before `--`: {line}"
    raise UsageError.one(words[0], reason, code="not-a-config")


def is_program(word: str) -> bool:
    """Whether a word that stands for a config names a script or another program."""
    from engine.config.loader import presets
    from engine.jobs.launch.command_checks import INTERPRETERS

    path = PurePath(word)
    if path.suffix in CONFIG_ENDINGS or word in presets():
        return False
    if path.suffix in INTERPRETERS:
        return True
    if Path(word).is_file():
        return os.access(word, os.X_OK)
    return not Path(word).exists() and shutil.which(word) is not None


def with_command(
    request: RunRequest, words: Sequence[str] | None, options: CommandOptions, flags: FlagOverrides, file: str | None
) -> RunRequest:
    """Return a request to run the words of a command, None for a training. Raises UsageError."""
    request = replace(request, tags=tuple(options.tag))
    if words is None:
        check_no_options(options, "gputrain run … -- COMMAND")
        return request
    if file is not None:
        raise UsageError.one(file, "is a config beside the command behind `--`; keep one of them", code="conflict")
    check_keys(request.typed, flags)
    return replace(
        request,
        command=make_command(words, options),
        default_name=command_stem(words),
        warnings=(),
    )


def check_no_options(options: CommandOptions, line: str) -> None:
    """Raise UsageError for the first option that only a command has and that is set; `line` has a command."""
    default = CommandOptions(tag=options.tag)
    for name in vars(default):
        if getattr(options, name) != getattr(default, name):
            advice = f"for a training, {SIMILAR[name]}" if name in SIMILAR else ""
            raise UsageError.one(f"--{name.replace('_', '-')}", f"is for a command: {line}", advice, code="conflict")


def is_command_key(key: str) -> bool:
    """Whether a config key has an effect on a command."""
    return key in COMMAND_KEYS or key.startswith(COMMAND_SECTIONS)


def check_keys(
    keys: Iterable[str], flags: FlagOverrides, advice: str = "an option of the command follows its name behind `--`"
) -> None:
    """Raise UsageError for what was typed for a training, which a command does not have."""
    typed = sorted(key for key in keys if not is_command_key(key))
    raise_if_any(
        [
            Problem(
                flags[key][0] if key in flags else key,
                "sets a training of gputrain, but this is a command",
                advice,
                code="no-effect",
            )
            for key in typed
        ]
    )


def make_command(words: Sequence[str], options: CommandOptions) -> Program:
    """Return what a typed line starts. Raises UsageError."""
    from engine.jobs.command.environment import capture_environment
    from engine.jobs.command.spec import Program

    cwd = Path.cwd() if options.cwd is None else expand_user(options.cwd).absolute()
    with file_errors("--cwd", f"{cwd} cannot be used", code="not-found"):
        inode = file_number(cwd.stat().st_ino)
    return Program(
        argv=tuple(words),
        cwd=str(cwd),
        cwd_inode=inode,
        environment=capture_environment(os.environ, options.env),
        expanded=tuple(setting.partition("=")[0] for setting in options.env if "=" in setting),
        stop_signal=_signal_name(options.stop_signal),
        parse=tuple(options.parse),
        metrics=tuple(options.metrics),
        on_resume=split_on_resume(options.on_resume or "", words),
    )


def split_on_resume(text: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that are added to the words of a command when it starts again. Raises UsageError."""
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        advice = "quote them as in a shell: --on-resume '--resume auto'"
        reason = f"cannot be split into arguments: {str(error).lower()}"
        raise UsageError.one("--on-resume", reason, advice, code="invalid-value") from error
    if arguments and ends_with_shell_line(words):
        reason = "the line of a shell behind -c takes no further arguments"
        advice = 'put it into a script that passes "$@" on'
        raise UsageError.one("--on-resume", reason, advice, code="conflict")
    return arguments


def _signal_name(text: str) -> str:
    """Return the name of a signal that is typed as INT, SIGINT or 2. Raises UsageError."""
    from engine.jobs.command.spec import STOP_SIGNALS

    name = text.upper()
    if name.isdecimal() and int(name) in {int(each) for each in signal.Signals}:
        return signal.Signals(int(name)).name
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in STOP_SIGNALS:
        reason = f"{text} cannot ask to stop; type INT, TERM, USR1 …"
        raise UsageError.one("--stop-signal", reason, code="invalid-value")
    return name


def command_stem(words: Sequence[str]) -> str:
    """Return the beginning of the name of a run: that of the script, the module or the program."""
    command = typed_command(words)
    is_file = command.script.endswith(SCRIPT_ENDINGS)
    name = command.script if is_file else command.script.rpartition(".")[2] or command.program or words[0]
    return name_from_stem(PurePath(name).stem)
