"""The `gputrain` command, and how the screen starts it so that runs outlive the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.launch.detached import LaunchedRun, start_detached

FALLBACK_PROGRAM = "from tui import main; main()"


def launch_run(arguments: Sequence[str], runs_dir: Path) -> LaunchedRun:
    """Start `gputrain ARGUMENTS` in its own session. Raises UsageError if the command cannot be started."""
    return start_detached([*gputrain_command(), *arguments], runs_dir)


def gputrain_command() -> list[str]:
    """Return the `gputrain` script next to this Python interpreter, or a `python -c` fallback."""
    script = Path(sys.executable).with_name("gputrain")
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-P", "-c", FALLBACK_PROGRAM]
