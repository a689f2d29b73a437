"""What the commands have in common: their arguments, and how they say what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tui.flags import FLAG_TO_KEY

if TYPE_CHECKING:
    from engine.config.loader import ResolvedConfig


class ConfigCommand(TyperCommand):
    """A command whose flags are described by the config's own fields, read only when its help is shown."""

    def get_help(self, ctx: Any) -> str:
        from engine.config.schema import describe_key

        for param in self.params:
            if param.name in FLAG_TO_KEY:
                param.help = f"{describe_key(FLAG_TO_KEY[param.name])} ({FLAG_TO_KEY[param.name]})"  # type: ignore[attr-defined]
        return super().get_help(ctx)


@contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """Say what is wrong, one line for each problem, and leave with exit code 2."""
    from engine.utils.errors import UsageError

    try:
        yield
    except UsageError as error:
        from engine.utils.text import printable

        for problem in error.problems:
            typer.echo(f"error: {printable(str(problem))}", err=True)
        raise typer.Exit(2) from error


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """CONFIG, where there is one, and the `section.key=value` arguments. Raises UsageError."""
    from engine.config.schema import fields
    from engine.utils.errors import UsageError

    overrides = [argument for argument in arguments or [] if is_override(argument)]
    files = [argument for argument in arguments or [] if not is_override(argument)]
    if known := [file for file in files if file in dict(fields())]:
        raise UsageError.one(known[0], f"is a key and needs its value behind an equals sign: {known[0]}=VALUE")
    if len(files) > 1:
        raise UsageError.one(
            files[1], f"is a second CONFIG beside {files[0]}; give one, and values as section.key=value"
        )
    return (files[0] if files else None), overrides


def is_override(argument: str) -> bool:
    """`section.key=value`, and not a path that has an equals sign in it."""
    return "/" not in argument.partition("=")[0] and "=" in argument


def flag_overrides(values: dict[str, str | None]) -> dict[str, tuple[str, str | bool]]:
    """Of parameters of a command and what was typed for them: the config's keys, each with the flag and its value."""
    return {
        FLAG_TO_KEY[name]: (f"--{name.replace('_', '-')} {value}", value)
        for name, value in values.items()
        if value is not None
    }


def resolve_arguments(
    arguments: list[str] | None, flags: dict[str, tuple[str, str | bool]] | None = None
) -> ResolvedConfig:
    from engine.config.loader import resolve_config

    file, overrides = split_arguments(arguments)
    return resolve_config(file, overrides, flags)


ARGUMENTS_HELP = "CONFIG (a YAML file or a preset such as digits), then section.key=value for any key of the config."
ConfigArguments = Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help=ARGUMENTS_HELP)]
RunsDirOption = Annotated[
    str | None, typer.Option("--runs-dir", help="Folder that runs lie in [default: $GPUTRAIN_RUNS or ./runs]")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LowBandwidthOption = Annotated[
    bool, typer.Option("--low-bandwidth", help="Draw every 5 seconds and not every second, for slow links.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, a unique beginning of it, its folder, or last.")
]
