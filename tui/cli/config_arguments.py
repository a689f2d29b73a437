"""CONFIG and KEY=VALUE: how typed words become a config, and whose code it may run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.completions import complete_config, complete_keys
from tui.cli.config_flags import FlagOverrides
from tui.cli.console import print_warning

if TYPE_CHECKING:
    from engine.config.code_trust import CodeTrust
    from engine.config.loader import ResolvedConfig


def print_no_effect(resolved: ResolvedConfig) -> None:
    """Print a warning for each key of a config that is set and has no effect."""
    for _, warning in resolved.no_effect:
        print_warning(warning)


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """Split the arguments into CONFIG (or None) and the `section.key=value` overrides.

    Raises UsageError if there is more than one CONFIG, or a key without a value.
    """
    from engine.config.schema import fields
    from engine.utils.errors import UsageError

    overrides = [argument for argument in arguments or [] if is_override(argument)]
    files = [argument for argument in arguments or [] if not is_override(argument)]
    if bare_keys := [file for file in files if file in dict(fields())]:
        raise UsageError.one(
            bare_keys[0], f"is a config key and needs a value: {bare_keys[0]}=VALUE", code="missing-value"
        )
    if len(files) > 1:
        raise UsageError.one(
            files[1],
            f"is a second CONFIG after {files[0]}; keep one, and set values as section.key=value",
            code="too-many",
        )
    return (regular_config(files[0]) if files else None), overrides


config_copies = contextlib.ExitStack()
"""Copies of configs. What exits without an interpreter shutdown closes it."""
atexit.register(config_copies.close)


@functools.cache
def regular_config(config: str) -> str:
    """Return CONFIG, or of a pipe, such as `<(…)`, the path of a copy.

    A pipe can be read once. A run in the background, or below the screen, is another process that reads its config.
    That of another user stays what it is, so that it is refused.
    """
    from engine.config.yaml_io import MAX_CONFIG_BYTES
    from engine.utils.files import expand_user
    from engine.utils.trust import foreign_reason

    path = expand_user(config)
    try:
        status = path.stat()
        if not stat.S_ISFIFO(status.st_mode) or foreign_reason(status) is not None:
            return config
        with path.open("rb") as pipe:
            # A larger one is refused.
            content = pipe.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError):
        return config
    folder = config_copies.enter_context(tempfile.TemporaryDirectory(prefix="gputrain-"))
    # Its name is the beginning of the name of the run.
    copy = Path(folder, "config.yaml")
    copy.write_bytes(content)
    return str(copy)


def is_override(argument: str) -> bool:
    """Return whether the argument is `section.key=value` rather than a path that contains an equals sign."""
    return "/" not in argument.partition("=")[0] and "=" in argument


def resolve_arguments(
    arguments: list[str] | None,
    flags: FlagOverrides | None = None,
    *,
    trust_code: bool = False,
    **options: Any,
) -> ResolvedConfig:
    """Resolve CONFIG, overrides and flags to a config; `options` are those of `resolve_config`.

    Raises UsageError with every problem found."""
    from engine.config.loader import resolve_config

    file, overrides = split_arguments(arguments)
    return resolve_config(file, overrides, flags, trust_code=trust_code, **options)


def code_trust(resolved: ResolvedConfig, *, granted: bool) -> CodeTrust:
    """Return whose code a resolved config may name; what runs only because of --trust-code is printed on stderr."""
    return replace(trust_option(granted=granted), foreign=resolved.foreign_code)


def trust_option(*, granted: bool) -> CodeTrust:
    """Return what --trust-code grants. Each of its messages is printed once, although several steps check the code."""
    from engine.config.code_trust import CodeTrust

    return CodeTrust(granted, notify=functools.cache(print_warning))


# `tui.cli.help` prints one line for each word of the metavar.
KEY_HELP = "Any config key: optim.momentum=0.8 or --momentum 0.8."
CONFIG_HELP = f"YAML file, preset such as digits, or folder of images.\n{KEY_HELP}"
ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help=CONFIG_HELP, autocompletion=complete_config),
]
ChangesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=KEY_HELP, autocompletion=complete_keys)
]
