"""Messages name options that a command has, with values that it takes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.gputrain_command import ROOT
from tui.cli.help import build_command
from tui.cli.tree import COMMANDS


def named_options() -> Iterator[tuple[Path, str]]:
    """Yield the options that stand alone in a text, as the place of a problem does, with their value if any."""
    files = [path for package in ("engine", "tui") for path in (ROOT / package).rglob("*.py")]
    for path in files:
        # The tree has the old options, too.
        for node in ast.walk(ast.parse(path.read_text())) if path.name != "tree.py" else ():
            if isinstance(node, ast.Call):
                for argument in node.args:
                    text = argument.value if isinstance(argument, ast.Constant) else None
                    if isinstance(text, str) and re.fullmatch(r"--[a-z-]+( [a-z]+)?", text):
                        yield path.relative_to(ROOT), text


def test_problems_are_located_at_options_that_a_command_has() -> None:
    known = defaultdict[str, list[Any]](list)
    for name in COMMANDS:
        for param in build_command(name).params:
            for opt in (*param.opts, *param.secondary_opts):
                known[opt].append(param)
    # Of other programs, of the sandbox, and of all commands.
    others = {
        "--demo",
        "--skill",
        "--help",
        "--version",
        "--user",
        "--scope",
        "--collect",
        "--nproc-per-node",
    }
    for path, text in named_options():
        if path.parts[:2] == ("engine", "code"):
            continue  # options of git
        option, _, value = text.partition(" ")
        types = [param.type_descriptor for param in known[option]]
        takes_value = any(kind.annotation is str or value in (kind.choices or ()) for kind in types)
        assert option in others or (types and (not value or takes_value)), f"{path}: {text}"
