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

from engine.runs.folder import RunFolder, list_runs
from engine.utils.errors import UsageError
from engine.utils.files import read_json

FALLBACK_PROGRAM = "from tui import main; main()"
LOGINCTL_TIMEOUT_SECONDS = 3.0
# A file system's clock may lag behind so far.
MTIME_TOLERANCE_SECONDS = 0.05


@dataclass
class LaunchedRun:
    """A supervisor that was started here. What it says before its run has a folder lies in a file without a name, which
    is gone with its readers."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    runs_dir: Path
    warning: str | None
    launched_at: float
    """Unix seconds."""

    def output_lines(self) -> list[str]:
        # By its place in the file: a seek would move the offset that the process writes at.
        handle = self.output.fileno()
        return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace").splitlines()

    def find_folder(self) -> RunFolder | None:
        """The run's folder, once its journal has begun or gone on: what is refused before leaves no trace there."""
        try:
            runs = list_runs(self.runs_dir)
        except UsageError:
            return None
        return next((run for run in runs if self._is_owner(run) and _mtime(run.journal) > self.launched_at), None)

    def _is_owner(self, run: RunFolder) -> bool:
        """Pids come again, on this host and on others: the owner must have written since the start."""
        if _mtime(run.owner) < self.launched_at:
            return False
        owner = read_json(run.owner) or {}
        return owner.get("pid") == self.process.pid and owner.get("host") == socket.gethostname()

    @property
    def exit_code(self) -> int | None:
        """The exit code, once it has ended."""
        return self.process.poll()


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def launch_run(arguments: Sequence[str], runs_dir: Path, cwd: Path | None = None) -> LaunchedRun:
    """`arguments` are those of `gputrain`. Raises UsageError where it cannot be started."""
    scope, warning = systemd_scope_prefix()
    output = tempfile.TemporaryFile()  # noqa: SIM115 (it is read as long as the run starts)
    command = [*scope, *gputrain_command(), *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    began = time.time() - MTIME_TOLERANCE_SECONDS
    try:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=environment | {"GPUTRAIN_RUNS": str(runs_dir)},
            start_new_session=True,
        )
    except OSError as error:
        output.close()
        raise UsageError.one(command[0], f"cannot be started: {error.strerror}") from error
    return LaunchedRun(process, output, runs_dir, warning, began)


def gputrain_command() -> list[str]:
    """How `gputrain` is called from here: the script beside this Python where there is one."""
    script = Path(sys.executable).with_name("gputrain")
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-P", "-c", FALLBACK_PROGRAM]


def systemd_scope_prefix() -> tuple[list[str], str | None]:
    """What goes before a command that is to live on after a logout, and a warning where it will not: a host may be set
    to end a user's processes then (logind.conf(5), KillUserProcesses). A scope of the user's own service manager lives
    on where that does (loginctl(1), enable-linger)."""
    if not _loginctl_enabled("KillUserProcesses"):
        return [], None
    if shutil.which("systemd-run") and _loginctl_enabled("Linger", str(os.getuid())):
        return ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--"], None
    return [], (
        "this host ends your processes when you log out (KillUserProcesses): the run will NOT survive that. "
        "`loginctl enable-linger` makes it survive"
    )


def _loginctl_enabled(name: str, *user: str) -> bool:
    """Whether a setting of the host, or of a user, is `yes`."""
    loginctl = shutil.which("loginctl")
    if loginctl is None:
        return False
    command = [loginctl, "show-user", *user, f"--property={name}", "--value"]
    try:
        done = subprocess.run(  # noqa: S603 (a fixed command)
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOGINCTL_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "yes"
