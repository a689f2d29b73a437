"""Help pages of the commands: grouped commands and options, short usage lines, examples and exit codes.

The command modules pass these classes to typer as `cls`. typer's own plain help prints one flat list of commands and
the Python type of each argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from tui.cli.arguments import exit_on_usage_error
from tui.cli.usage_errors import one_line_usage_errors, takes_config_keys, unknown_command_problem
from tui.flags import FLAG_TO_KEY

TRAIN, RUNS, RESULTS, MACHINE = "Train", "Runs", "Results", "Machine"
"""Groups of commands, in the order of `gputrain --help`."""
CONFIG_OPTIONS = "Config options"
# No option of gputrain contains a dot.
KEY_OPTION = re.compile(r"--[A-Za-z]\w*\.[\w.-]+")
MAX_HELP_COLUMNS = 120
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": MAX_HELP_COLUMNS}


class ReportingGroup(TyperGroup):
    """A group that reports a usage error in one line, with the nearest command."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        with one_line_usage_errors():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: Any) -> Any:
        # Parses the command's name, and what groups within this one parse.
        with one_line_usage_errors():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        from engine.utils.errors import UsageError

        with exit_on_usage_error():
            raise UsageError([unknown_command_problem(args[0], ctx, list(self.commands))])


class GroupedCommands(ReportingGroup):
    """A group whose help lists its commands by `rich_help_panel`, before its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        write_parameters(self, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for group in (TRAIN, RUNS, RESULTS, MACHINE):
            commands = {name: item for name, item in self.commands.items() if item.rich_help_panel == group}  # type: ignore[attr-defined]
            with formatter.section(group):
                formatter.write_dl(
                    [(name.ljust(width), item.get_short_help_str(90)) for name, item in commands.items()]
                )


class CommandGroup(ReportingGroup):
    """A group of subcommands, such as `gputrain runs`, whose help lists them on one line each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        write_parameters(self, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, item.get_short_help_str(90)) for name, item in self.commands.items() if not item.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class DefaultCommandGroup(CommandGroup):
    """A group that runs its hidden command `list` unless the first word names another one.

    Usage, arguments and options of its help are those of `list`. After `--`, each word belongs to `list`.
    """

    DEFAULT = "list"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] in self._subcommands:
            return super().parse_args(ctx, args)
        guarded, words = guard_minus_words(self.commands[self.DEFAULT], args)
        if any(name in guarded for name in ctx.help_option_names):
            return super().parse_args(ctx, [ctx.help_option_names[0]])
        if (misplaced := next((word for word in words if word in self._subcommands), None)) is not None:
            ctx.fail(
                f"{misplaced} is a command: write `{ctx.command_path} {misplaced} …`, or `-- {misplaced}` at the end "
                "to search for the word."
            )
        return super().parse_args(ctx, [self.DEFAULT, *guarded])

    @property
    def _subcommands(self) -> list[str]:
        return [name for name, item in self.commands.items() if not item.hidden]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return self.commands[self.DEFAULT].collect_usage_pieces(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        write_parameters(self.commands[self.DEFAULT], ctx, formatter)


class HelpCommand(TyperCommand):
    """A command whose usage line and argument names are the metavars as written."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        with one_line_usage_errors():
            return super().make_context(*arguments, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, join_key_options(args) if takes_config_keys(self) else args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param.metavar for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(metavar for metavar in arguments if metavar)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)


def join_key_options(args: Sequence[str]) -> list[str]:
    """Return the arguments with `section.key=value` for each `--section.key value` before `--`.

    A key without a value becomes an argument of its own, which the command refuses.
    """
    joined, number = list[str](), 0
    while number < len(args) and args[number] != "--":
        option, sign, value = args[number].partition("=")
        number += 1
        if KEY_OPTION.fullmatch(option) is None:
            joined.append(f"{option}{sign}{value}")
            continue
        if not sign and number < len(args) and not args[number].startswith("--"):
            sign, value = "=", args[number]
            number += 1
        joined.append(f"{option[2:].replace('-', '_')}{sign}{value}")
    return [*joined, *args[number:]]


class MinusWordsCommand(HelpCommand):
    """A command whose arguments may begin with a minus: it gets them with an exclamation mark instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, guard_minus_words(self, args)[0])


def guard_minus_words(command: Any, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace the minus of each argument such as `-tag=old`, which click would take for options, by `!`.

    Returns all arguments, and those before `--` that are neither options nor their values.
    """
    options = {name: param for param in command.params if param.param_type_name == "option" for name in param.opts}
    guarded, words, is_value = list[str](), list[str](), False
    for number, arg in enumerate(args):
        if arg == "--" and not is_value:
            return [*guarded, *args[number:]], words
        name, sign, _ = arg.partition("=")
        if is_value or arg in ("-h", "--help") or name in options or arg.startswith("--"):
            is_value = not is_value and name in options and not sign and not options[name].is_flag
            guarded.append(arg)
            continue
        word = f"!{arg[1:]}" if arg.startswith("-") and len(arg) > 1 else arg
        guarded.append(word)
        words.append(word)
    return guarded, words


class ConfigCommand(HelpCommand):
    """A command that takes the help of its config options from the config fields, loaded only when help is shown."""

    def get_help(self, ctx: Any) -> str:
        from engine.config.schema import describe_key

        for param in self.params:
            if param.name in FLAG_TO_KEY:
                param.help = f"{describe_key(FLAG_TO_KEY[param.name])} ({FLAG_TO_KEY[param.name]})"  # type: ignore[attr-defined]
                param.metavar = param.name.upper()
                param.rich_help_panel = CONFIG_OPTIONS  # type: ignore[attr-defined]
        return super().get_help(ctx)


def write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    """Write arguments, then options by `rich_help_panel`.

    An argument that stands for several words, such as `[CONFIG] [KEY=VALUE]...`, has one line of help for each word.
    """
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if param.param_type_name == "argument":
            names, lines = param.metavar.split(), param.help.splitlines()
            sections["Arguments"].extend(zip(names, lines, strict=True))
        elif (record := param.get_help_record(ctx)) is not None:
            sections.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def make_epilog(examples: Sequence[str], *notes: str, exit_codes: Mapping[int, str] | None = None) -> str:
    """Return the end of a help page: examples, notes and exit codes."""
    # \b keeps click from rewrapping the lines of a paragraph.
    parts = ["\b\nExamples:", *(f"  {example}" for example in examples)]
    for note in notes:
        parts += ["", note]
    if exit_codes:
        parts += ["", "\b\nExit codes:", *(f"  {code}  {meaning}" for code, meaning in exit_codes.items())]
    return "\n".join(parts)
