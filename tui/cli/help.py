"""The classes of the commands and their groups, which parse arguments and write the help pages of `tui.cli.help_page`.

The groups build the commands of `tui.cli.tree` when they are called: typer imports every command at once.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from engine.base.errors import UsageError, nearest
from tui.cli.console import exit_on_usage_error
from tui.cli.help_page import COMMAND_OPTIONS, CONFIG_OPTIONS, PANELS, make_help, panel_of, write_parameters
from tui.cli.tree import COMMANDS, TOP_PANELS, WORDS, subcommands
from tui.cli.usage_errors import bare_key, one_line_usage_errors, takes_config_keys, unknown_command_problem

COMPLETE_VARIABLE = "_GPUTRAIN_COMPLETE"
# No option of gputrain contains a dot.
KEY_OPTION = re.compile(r"--[A-Za-z]\w*\.[\w.-]+")
MAX_HELP_COLUMNS = 120
HELP_WORD = "help"
WORDS_KEY = "gputrain.words"
"""Key of the words behind the name of a command, in its context."""
# Options that `gputrain run --help` describes. A command with more of them than this only names them.
NAMED_PANELS, MAX_DESCRIBED = (CONFIG_OPTIONS, COMMAND_OPTIONS), 4
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": MAX_HELP_COLUMNS}


def build_command(name: str) -> Any:
    """Import a command of the tree and build it."""
    entry = COMMANDS[name]
    module, _, target = entry.target.partition(":")
    found = getattr(importlib.import_module(f"tui.cli.{module}"), target)
    text = make_help(found.callback.__doc__, found.examples)
    info = CommandInfo(name.rpartition(" ")[2], cls=found.kind, callback=found.callback, help=text, epilog=found.epilog)
    built: Any = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)
    built.needs_torch = entry.needs_torch
    built.examples = found.examples
    return built


class LazyGroup(TyperGroup):
    """A group that builds a command when it is called, and reports a usage error in one line."""

    path = ""
    """Words before those of its commands, with a blank at the end."""

    def get_params(self, ctx: Any) -> list[Any]:
        return convert_late(super().get_params(ctx))

    def names(self) -> dict[str, str]:
        """Return its commands by name, each with its line of help."""
        return {name: word.summary for name, word in WORDS.items()}

    def build(self, name: str) -> Any:
        """Return the command of this name."""
        return DefaultGroup(name) if WORDS[name].default else build_command(name)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.names())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.names():
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = self.build(cmd_name)
        return self.commands[cmd_name]

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        with one_line_usage_errors():
            return super().make_context(*arguments, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            # `gputrain help run` means `gputrain run --help`.
            is_help = args[:1] == [HELP_WORD] and not self.path
            args = [*args[1:], ctx.help_option_names[1]] if is_help else args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        # Parses the command's name, and what groups within this one parse.
        with one_line_usage_errors():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.names() or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)

        with exit_on_usage_error():
            raise UsageError([unknown_command_problem(args[0], ctx, list(self.names()), args[1:])])

    def main(self, *arguments: Any, **extra: Any) -> Any:
        if COMPLETE_VARIABLE not in os.environ:
            return super().main(*arguments, **extra)
        # A shell asks for words. A fault has none, and prints nothing into the prompt.
        with redirect_stderr(StringIO()):
            try:
                return super().main(*arguments, **extra)
            except Exception:
                raise SystemExit(1) from None

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        words = {name: text for name, text in self.names().items() if name.startswith(incomplete)}
        found = [SimpleNamespace(value=name, help=text, type="plain") for name, text in words.items()]
        # Of the command itself: options.
        return [*found, *super(TyperGroup, self).shell_complete(ctx, incomplete)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, WORDS))
        formatter.write_paragraph()
        # No blank lines between the groups: the page fits a small terminal.
        for panel in TOP_PANELS:
            formatter.write_heading(panel)
            with formatter.indentation():
                rows = [(name.ljust(width), word.summary) for name, word in WORDS.items() if word.panel == panel]
                formatter.write_dl(rows)


class DefaultGroup(LazyGroup):
    """A group that calls its default command unless the first word names another one.

    Usage, arguments, options and examples of its help are those of the default.
    """

    def __init__(self, name: str) -> None:
        self.path, self.default = f"{name} ", WORDS[name].default
        command: Any = build_command(f"{self.path}{self.default}")
        self.default_command = command
        super().__init__(
            name=name, commands={self.default: command}, help=command.help, epilog=command.epilog, rich_markup_mode=None
        )

    def names(self) -> dict[str, str]:
        return {name: COMMANDS[f"{self.path}{name}"].summary for name in subcommands(self.path.rstrip())}

    def build(self, name: str) -> Any:
        return build_command(f"{self.path}{name}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if (args and args[0] in self.names()) or (len(args) <= 1 and ctx.resilient_parsing and not args):
            return super().parse_args(ctx, args)
        if any(name in args[: _first_separator(args)] for name in ctx.help_option_names):
            return super().parse_args(ctx, [ctx.help_option_names[0]])
        if not ctx.resilient_parsing:
            self.default_command.check_words(ctx, args, list(self.names()))
        return super().parse_args(ctx, [self.default, *args])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return list(self.default_command.collect_usage_pieces(ctx))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return [*super().shell_complete(ctx, incomplete), *self.default_command.first_words(ctx, incomplete)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        write_parameters(self.default_command, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.names().items()))


def _first_separator(args: Sequence[str]) -> int:
    return args.index("--") if "--" in args else len(args)


class HelpCommand(TyperCommand):
    """A command whose usage line and argument names are the metavars as written.

    It prints a UsageError in one line for each problem, and exits with code 2.
    """

    takes_any_word = False
    """Whether its arguments may be any text."""
    needs_torch = False
    examples: Sequence[str] = ()
    core_advice = ""
    """What to do without the libraries of the extra `train`, besides installing it."""

    def get_params(self, ctx: Any) -> list[Any]:
        return convert_late(super().get_params(ctx))

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        with one_line_usage_errors():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: Any) -> Any:
        with exit_on_usage_error():
            if self.trains(ctx):
                from engine.base.libraries import check_training

                check_training(ctx.command_path, self.core_advice)
            if any(":" in name for name in _run_names(ctx)):
                from tui.cli.host_runs import run_on_hosts

                if run_on_hosts(ctx, ctx.meta[WORDS_KEY], lambda: super(HelpCommand, self).invoke(ctx)):
                    return None
            return super().invoke(ctx)

    def trains(self, ctx: Any) -> bool:
        """Whether the command as typed needs the libraries of the extra `train`."""
        return self.needs_torch

    def check_words(self, ctx: Any, args: Sequence[str], commands: Sequence[str]) -> None:
        """Refuse arguments that name, or nearly name, commands of the group that calls this one by default."""

        words = guard_minus_words(self, args)[1]
        if (word := next((word for word in words if word in commands), None)) is not None:
            search = f", or `{ctx.command_path} {self.name} … {word}` to search for it" if self.takes_any_word else ""
            ctx.fail(f"{word} is a command: write `{ctx.command_path} {word} …`{search}")
        has_argument = any(param.param_type_name == "argument" for param in self.params)
        # One word may be a path. Several are no CONFIG.
        is_typo = len(words) > 1 and "=" not in words[1] and nearest(words[0], commands) is not None
        if words and not self.takes_any_word and (is_typo or not has_argument):
            with exit_on_usage_error():
                raise UsageError([unknown_command_problem(words[0], ctx, list(commands))])

    def first_words(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the completions of its first argument, for the group that calls it by default."""
        with self.make_context(self.name, [], parent=ctx, resilient_parsing=True) as own:
            arguments = [param for param in self.params if param.param_type_name == "argument"]
            return list(arguments[0].shell_complete(own, incomplete)) if arguments else []

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[WORDS_KEY] = [*args]
        if takes_config_keys(self) and not ctx.resilient_parsing:
            args = join_key_options(args, lambda option: bare_key(option, ctx))
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param.metavar for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(metavar for metavar in arguments if metavar)]

    @property
    def panels(self) -> tuple[str, ...]:
        """The first sections of parameters on its help page, in their order."""
        return PANELS

    def panel_of(self, param: Any) -> str:
        """Return the section of an option."""
        return panel_of(param)

    def named_in(self, param: Any) -> str | None:
        """Return the title of the section that lists an option by name only; None if the page describes the option."""
        flags = [each for each in self.params if panel_of(each) == panel_of(param)]
        is_described = panel_of(param) not in NAMED_PANELS or len(flags) <= MAX_DESCRIBED
        return None if is_described else f"{panel_of(param)}, described by gputrain run --help"

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)


def _run_names(ctx: Any) -> list[str]:
    """Return the runs that were typed as arguments."""
    run = ctx.params.get("run")
    return ctx.params.get("runs") or ([run] if isinstance(run, str) else [])


def convert_late(parameters: list[Any]) -> list[Any]:
    """Let typer convert only what was typed and is not text.

    It builds each conversion with pydantic, whose import takes a third of the CPU time of `gputrain runs`."""
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            parameter.process_value = partial(_convert_late, parameter, parameter.process_value)
    return parameters


def _convert_late(parameter: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    annotation = parameter.type_descriptor.annotation
    is_text = annotation is str or get_args(annotation) == (str,)
    is_plain = is_text or value is None or value is parameter.default
    is_missing = parameter.required and not value
    return value if ctx.resilient_parsing or (is_plain and not is_missing) else convert(ctx, value)


def join_key_options(args: Sequence[str], find_key: Callable[[str], str] = lambda _: "") -> list[str]:
    """Return the arguments with `section.key=value` for each `--section.key value` before `--`, and for each option
    that `find_key` maps to a key.

    A key without a value is set to true if it is a switch; any other becomes an argument, which the command refuses.
    """
    joined, number = list[str](), 0
    while number < len(args) and args[number] != "--":
        option, sign, value = args[number].partition("=")
        number += 1
        key = option[2:].replace("-", "_") if KEY_OPTION.fullmatch(option) is not None else find_key(option)
        if not key:
            joined.append(f"{option}{sign}{value}")
            continue
        if not sign and number < len(args) and not args[number].startswith("--"):
            sign, value = "=", args[number]
            number += 1
        joined.append(f"{key}{sign}{value}" if sign or not _is_switch(key) else f"{key}=true")
    return [*joined, *args[number:]]


def _is_switch(key: str) -> bool:
    """Whether a config key is true or false."""
    from engine.config.schema import fields

    field = dict(fields()).get(key)
    return field is not None and field.annotation is bool


class MinusWordsCommand(HelpCommand):
    """A command whose arguments may begin with a minus: it gets them with an exclamation mark instead."""

    takes_any_word = True

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
