"""Command lines of `gputrain`, parsed without running them."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from typer.main import get_command

from tui.cli.help import LazyGroup
from tui.cli.main import app


def parse_line(words: Sequence[str]) -> int:
    """Parse the words after `gputrain`, and return the exit code: 0 if they are a command."""
    name, command, context, left = "gputrain", get_command(app), None, [*words]
    try:
        while isinstance(command, LazyGroup):
            context = command.make_context(name, left, parent=context)
            name, command, left = command.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(name, left, parent=context)
    except typer.Exit as error:
        return error.exit_code
    return 0
