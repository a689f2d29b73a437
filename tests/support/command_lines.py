"""Command lines of `gputrain`, parsed without running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.main import get_command

from tui.cli.help import LazyGroup
from tui.cli.main import app


def parse_line(words: Sequence[str]) -> int:
    """Parse the words after `gputrain`, and return the exit code: 0 if they are a command."""
    try:
        _parse(words)
    except typer.Exit as error:
        return error.exit_code
    return 0


def parse_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments of the command that these words after `gputrain` are, without its first one."""
    values = _parse(words).params
    found = values.get("arguments") or values.get("changes") or values.get("overrides") or []
    return [word for word in found if "=" in word]


def _parse(words: Sequence[str]) -> Any:
    """Return the context of a command. Raises typer.Exit if it is refused."""
    name, command, context, left = "gputrain", get_command(app), None, [*words]
    while isinstance(command, LazyGroup):
        context = command.make_context(name, left, parent=context)
        name, command, left = command.resolve_command(context, [*context._protected_args, *context.args])
    return command.make_context(name, left, parent=context)
