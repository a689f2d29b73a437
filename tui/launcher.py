"""Starts a run as a person would type it: in a session of its own, with nothing of this terminal, so that it outlives
the screen."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from engine.runs.folder import RunFolder, all_runs
from engine.utils.errors import UsageError
from engine.utils.files import read_json

PROGRAM = "from tui import main; main()"
ASK_SECONDS = 3.0
# A file system's clock may lag behind so far.
CLOCK_SECONDS = 0.05


@dataclass
class Started:
    """A supervisor that was started here. What it says before its run has a folder lies in a file without a name, which
    is gone with its readers."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    root: Path
    warning: str | None
    began: float
    """Unix seconds."""

    def lines(self) -> list[str]:
        # By its place in the file: a seek would move the offset that the process writes at.
        handle = self.output.fileno()
        return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace").splitlines()

    def folder(self) -> RunFolder | None:
        """The run's folder, once its journal has begun or gone on: what is refused before leaves no trace there."""
        try:
            runs = all_runs(self.root)
        except UsageError:
            return None
        return next((run for run in runs if self._owns(run) and _changed(run.journal) > self.began), None)

    def _owns(self, run: RunFolder) -> bool:
        """Pids come again, on this host and on others: the owner must have written since the start."""
        if _changed(run.owner) < self.began:
            return False
        owner = read_json(run.owner) or {}
        return owner.get("pid") == self.process.pid and owner.get("host") == socket.gethostname()

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""
        return self.process.poll()


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def start_run(arguments: Sequence[str], root: Path, cwd: Path | None = None) -> Started:
    """`arguments` are those of `gputrain`. Raises UsageError where it cannot be started."""
    scope, warning = scope_command()
    output = tempfile.TemporaryFile()  # noqa: SIM115 (it is read as long as the run starts)
    command = [*scope, *command_line(), *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    began = time.time() - CLOCK_SECONDS
    try:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=environment | {"GPUTRAIN_RUNS": str(root)},
            start_new_session=True,
        )
    except OSError as error:
        output.close()
        raise UsageError.one(command[0], f"cannot be started: {error.strerror}") from error
    return Started(process, output, root, warning, began)


def command_line() -> list[str]:
    """How `gputrain` is called from here: the script beside this Python where there is one."""
    script = Path(sys.executable).with_name("gputrain")
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-P", "-c", PROGRAM]


def scope_command() -> tuple[list[str], str | None]:
    """What goes before a command that is to live on after a logout, and a warning where it will not: a host may be set
    to end a user's processes then (logind.conf(5), KillUserProcesses). A scope of the user's own service manager lives
    on where that does (loginctl(1), enable-linger)."""
    if not _logind("KillUserProcesses"):
        return [], None
    if shutil.which("systemd-run") and _logind("Linger", str(os.getuid())):
        return ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--"], None
    return [], (
        "this host ends your processes when you log out (KillUserProcesses): the run will NOT survive that. "
        "`loginctl enable-linger` makes it survive"
    )


def _logind(name: str, *user: str) -> bool:
    """Whether a setting of the host, or of a user, is `yes`."""
    loginctl = shutil.which("loginctl")
    if loginctl is None:
        return False
    command = [loginctl, "show-user", *user, f"--property={name}", "--value"]
    try:
        done = subprocess.run(  # noqa: S603 (a fixed command)
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "yes"
