"""The tree of commands follows one grammar: an option means one thing, and what is guessed is answered."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

import pytest
from click import Context
from typer.main import get_command
from typer.testing import CliRunner

from tui.cli.main import app
from tui.cli.tree import COMMANDS, OPTION_GUESSES

# Modules that a command imports when it runs.
HEAVY_MODULES = {"torch", "pydantic", "rich", "textual"}


def refuse(*words: str) -> str:
    """Return what is said about words that are refused."""
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 2
    return result.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train a.yaml --epochs 3", "gputrain run a.yaml --epochs 3"),
        ("kill a b", "gputrain stop a b"),
        ("runs rm 'a b'", "gputrain runs delete 'a b'"),
        ("tag a +old", "gputrain runs tag a +old"),
        ("mistakes a --count 3", "gputrain evaluate a --list mistakes"),
    ],
)
def test_guess_of_command_has_what_was_typed(typed: str, meant: str) -> None:
    assert f"did you mean `{meant}`?" in refuse(*shlex.split(typed))


def test_guess_of_option_names_an_option_of_the_command() -> None:
    unknown = []
    for typed, meant in OPTION_GUESSES.items():
        command: Any = get_command(app)
        context = Context(command)
        for word in typed.split()[:-1]:
            command = command.get_command(context, word)
        commands = [command, *(command.get_command(context, name) for name in getattr(command, "commands", ()))]
        options = {
            option
            for part in commands
            for parameter in part.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        if meant.startswith("--") and meant.split()[0] not in options:
            unknown.append((typed, meant))
    assert unknown == []


def test_modules_of_commands_import_nothing_heavy() -> None:
    modules = sorted({f"tui.cli.{entry.target.partition(':')[0]}" for entry in COMMANDS.values()})
    program = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        f"    if heavy := {HEAVY_MODULES!r} & {{*sys.modules}}:\n"
        "        sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)
