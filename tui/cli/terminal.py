"""Whether the screen can be drawn on the terminal, and which commands print the same.

Without typer, because `gputrain-tui` does without it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from engine.base.errors import UsageError

# Terminals that print lines alone, such as the shell of Emacs. The variable is missing where no terminal is expected.
DUMB_TERMS = ("", "dumb")


def is_on_terminal() -> bool:
    """Whether somebody types into this process and reads what it prints. stderr may be redirected."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def moves_cursor() -> bool:
    """Whether the type of the terminal has a cursor that can be moved."""
    return os.environ.get("TERM", "") not in DUMB_TERMS


def require_terminal(*plain: str) -> None:
    """Raise UsageError unless the screen can be drawn. `plain` are the commands that print what it would show."""
    commands = " or ".join(f"`{command}`" for command in plain)
    if not is_on_terminal():
        raise UsageError.one("the screen", f"needs a terminal; without one, run {commands}", code="no-terminal")
    if not moves_cursor():
        term = os.environ.get("TERM") or "''"
        raise UsageError.one(
            "the screen",
            f"cannot be drawn with TERM={term}",
            f"set it to the type of this terminal, such as xterm-256color, or run {commands}",
            code="no-terminal",
        )


def plain_commands(runs: Sequence[str], runs_dir: str | None) -> list[str]:
    """Return the commands that print what the screen shows of these runs, or of the GPUs without a run."""
    words = shlex.join([*runs, *([] if runs_dir is None else ["--runs-dir", runs_dir])])
    if len(runs) > 1:
        return [f"gputrain compare {words}"]
    return [f"gputrain runs show {words}", f"gputrain logs {words}"] if runs else ["gputrain gpus"]
