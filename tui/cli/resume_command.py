"""The stored command of a run that is resumed: whether it may start, what it would start, and what changes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping

import typer

from engine.base.codec import replace as with_values
from engine.base.errors import Problem, UsageError
from engine.base.redaction import redact
from engine.base.text import printable
from engine.jobs.command.environment import renew_environment
from engine.jobs.command.spec import Program, foreign_command_reason, read_command
from engine.runs.folder import RunFolder
from tui.cli.console import print_warning
from tui.cli.run_command import CommandOptions, split_on_resume

# Of what a stored command would run, in an error.
MAX_SHOWN_CHARS, MAX_VARIABLE_CHARS, MAX_SHOWN_VARIABLES = 4000, 200, 100


def stored_command(folder: RunFolder, *, trust_code: bool) -> Program:
    """Return the command of a run or sweep that is resumed. Raises UsageError unless this user wrote or trusts it."""
    command = read_command(folder)
    file_reason, folder_reason = foreign_command_reason(folder), folder.foreign_reason()
    reason = (
        f"{folder.command.name} {file_reason}"
        if file_reason
        else f"its folder {folder_reason}"
        if folder_reason
        else ""
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


def renew_command(command: Program, options: CommandOptions) -> Program:
    """Return a stored command with what changes when it starts again. Raises UsageError."""
    if not command.environment:
        # It has finished, and is refused for that.
        return command
    environment, expanded = renew_environment(command, os.environ, options.env)
    on_resume = command.on_resume if options.on_resume is None else split_on_resume(options.on_resume, command.argv)
    return with_values(command, environment=environment, expanded=expanded, on_resume=on_resume)


def describe_command(command: Program, own: Mapping[str, str]) -> Iterator[str]:
    """Yield lines that tell what a stored command would run, compared with the environment `own` of this shell."""

    def bound(text: str, max_chars: int) -> str:
        text, more = printable(text[:max_chars]), len(text) - max_chars
        return f"{text} … and {more} characters more" if more > 0 else text

    yield f"command: {bound(shlex.join(command.argv), MAX_SHOWN_CHARS)}"
    yield f"folder: {bound(command.cwd, MAX_SHOWN_CHARS)}"
    if command.on_resume:
        yield f"arguments on resume: {bound(shlex.join(command.on_resume), MAX_SHOWN_CHARS)}"
    yield f"stop signal: {command.stop_signal}"
    others = [(name, value) for name, value in command.environment.items() if own.get(name) != value]
    for name, value in others[:MAX_SHOWN_VARIABLES]:
        yield f"variable: {bound(f'{name}={redact(name, value)}', MAX_VARIABLE_CHARS)}"
    if len(others) > MAX_SHOWN_VARIABLES:
        yield f"and {len(others) - MAX_SHOWN_VARIABLES} more variables that this shell does not have"
