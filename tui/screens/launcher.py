"""The `gputrain` command, and how the screen starts it so that runs outlive the screen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.base.errors import UsageError
from engine.jobs.launch.detached import LaunchedRun, start_detached

FALLBACK_PROGRAM = "from tui import main; main()"
# A host that starts a run has 300 s.
CALL_SECONDS = 330.0
MAX_ERROR_LINES = 8
CALLED_HOST = "GPUTRAIN_HOST"
"""The variable of a screen that is opened on a host through ssh: the name of that host where the user sits."""


def launch_run(arguments: Sequence[str], runs_dir: Path) -> LaunchedRun:
    """Start `gputrain ARGUMENTS` in its own session. Raises UsageError if the command cannot be started."""
    return start_detached([*gputrain_command(), *arguments], runs_dir)


def call_gputrain(arguments: Sequence[str], runs_dir: Path) -> str:
    """Return what `gputrain ARGUMENTS` prints, with its messages first. Raises UsageError with the last of them if it
    fails."""
    command, environment = [*gputrain_command(), *arguments], os.environ | {"GPUTRAIN_RUNS": str(runs_dir)}
    try:
        ended = subprocess.run(  # noqa: S603 (ours)
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CALL_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        raise UsageError.one("", f"no answer within {CALL_SECONDS:.0f} s", code="timed-out") from None
    text = (ended.stderr + ended.stdout).decode(errors="replace").strip()
    if ended.returncode:
        told = "\n".join(text.removeprefix("error: ").splitlines()[-MAX_ERROR_LINES:])
        raise UsageError.one("", told, code="refused")
    return text


def gputrain_command() -> list[str]:
    """Return the `gputrain` script next to this Python interpreter, or a `python -c` fallback."""
    script = Path(sys.executable).with_name("gputrain")
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-P", "-c", FALLBACK_PROGRAM]
