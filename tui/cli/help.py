"""Help pages of the commands: grouped commands and options, short usage lines, examples and exit codes.

The command modules pass these classes to typer as `cls`. typer's own plain help prints one flat list of commands and
the Python type of each argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from tui.flags import FLAG_TO_KEY

TRAIN, RUNS, RESULTS, MACHINE = "Train", "Runs", "Results", "Machine"
"""Groups of commands, in the order of `gputrain --help`."""
CONFIG_OPTIONS = "Config options"
MAX_HELP_COLUMNS = 120
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": MAX_HELP_COLUMNS}


class GroupedCommands(TyperGroup):
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


class HelpCommand(TyperCommand):
    """A command whose usage line and argument names are the metavars as written."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param.metavar for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(metavar for metavar in arguments if metavar)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)


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
