"""The tree of commands."""

from __future__ import annotations

import subprocess
import sys

from tui.cli.tree import COMMANDS

# Modules that a command imports when it runs.
HEAVY_MODULES = {"torch", "pydantic", "rich", "textual"}


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
