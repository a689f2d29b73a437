"""Start a command that outlives its starter: in its own session, without the terminal, its output in an unnamed file.

`tui.launcher` starts runs from the screen and the command line with it, `engine.sweeps` the trials of a sweep.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from engine.runs.claim import Origin, read_claim
from engine.runs.folder import RunFolder, list_runs
from engine.utils.errors import UsageError

if TYPE_CHECKING:
    from engine.runs.watcher import RunWatcher

ACCEPT_POLL_SECONDS = 0.05
LOGINCTL_TIMEOUT_SECONDS = 3.0
# File timestamps may lag behind time.time() by one kernel tick.
MTIME_TOLERANCE_SECONDS = 0.05


@dataclass
class LaunchedRun:
    """A supervisor process started by `start_detached`; `output` is an unnamed file with its stdout and stderr."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    runs_dir: Path
    warning: str | None
    launched_at: float
    """Unix seconds."""
    title: str = "new run"
    """What was started, for the title of the screen."""
    _watchers: dict[Path, RunWatcher] = field(default_factory=dict)

    def output_lines(self) -> list[str]:
        """Return what the supervisor has printed so far."""
        # pread, because a seek would move the file offset that the supervisor writes at.
        handle = self.output.fileno()
        return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace").splitlines()

    def find_folder(self) -> RunFolder | None:
        """Return the run folder once the run has begun or ended there. A refused start deletes the folder again."""
        try:
            runs = list_runs(self.runs_dir)
        except UsageError:
            return None
        return next((run for run in runs if self._is_owner(run) and self._has_begun(run)), None)

    def _has_begun(self, run: RunFolder) -> bool:
        """Return whether the journal has the start or the end of this session. Warnings may precede its start."""
        from engine.runs.watcher import RunWatcher

        if _mtime(run.journal) <= self.launched_at:
            return False
        history = self._watchers.setdefault(run.path, RunWatcher(run)).poll()
        return any(
            event is not None and event.time >= self.launched_at
            for event in (history.waiting, history.started, history.finished)
        )

    def wait_until_accepted(self) -> RunFolder | None:
        """Return the folder of a run that was started with `--detach`, once it stays whatever becomes of the run.

        Return None if the command exited before."""
        while (folder := self._find_accepted()) is None:
            if self.exit_code is not None:
                # It may have been accepted and have ended since the folders were read.
                return self._find_accepted()
            time.sleep(ACCEPT_POLL_SECONDS)
        return folder

    def _find_accepted(self) -> RunFolder | None:
        from engine.queue.state import read_queue_state

        for run in list_runs(self.runs_dir):
            # PIDs are reused, so queue.json must be newer than the launch.
            if run.is_own and _mtime(run.queue) >= self.launched_at:
                state = read_queue_state(run)
                if state is not None and state.pid == self.process.pid:
                    return run
        return None

    def _is_owner(self, run: RunFolder) -> bool:
        """Return whether this process owns the run. PIDs are reused, so owner.json must be newer than the launch."""
        if not run.is_own or _mtime(run.owner) < self.launched_at:
            return False
        claim = read_claim(run.owner)
        return claim is not None and claim.pid == self.process.pid and claim.origin is Origin.THIS_KERNEL

    @property
    def exit_code(self) -> int | None:
        """Exit code of the supervisor, or None while it runs."""
        return self.process.poll()


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def start_detached(command: Sequence[str], runs_dir: Path, title: str = "new run") -> LaunchedRun:
    """Start a `gputrain` command in its own session, with `runs_dir` as its runs folder.

    Raises UsageError if it cannot be started.
    """
    scope, warning = systemd_scope_prefix()
    output = tempfile.TemporaryFile()  # noqa: SIM115 (read while the run starts)
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    launched_at = time.time() - MTIME_TOLERANCE_SECONDS
    try:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            [*scope, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment | {"GPUTRAIN_RUNS": str(runs_dir)},
            start_new_session=True,
        )
    except OSError as error:
        output.close()
        raise UsageError.one(command[0], f"cannot be started: {error.strerror}") from error
    return LaunchedRun(process, output, runs_dir, warning, launched_at, title)


def systemd_scope_prefix() -> tuple[list[str], str | None]:
    """Return a command prefix that keeps a process alive after logout, or a warning if there is none.

    With KillUserProcesses=yes (logind.conf(5)), systemd kills the processes of a user at logout. A scope of the user's
    service manager survives if lingering is enabled (loginctl(1), enable-linger).
    """
    if not _loginctl_enabled("KillUserProcesses"):
        return [], None
    if shutil.which("systemd-run") and _loginctl_enabled("Linger", str(os.getuid())):
        return ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--"], None
    return [], (
        "this host kills your processes at logout (KillUserProcesses=yes): the run will NOT survive it. "
        "To keep it running: loginctl enable-linger"
    )


def _loginctl_enabled(name: str, *user: str) -> bool:
    """Return whether a logind property of the host, or of a user, is `yes`."""
    loginctl = shutil.which("loginctl")
    if loginctl is None:
        return False
    command = [loginctl, "show-user", *user, f"--property={name}", "--value"]
    try:
        result = subprocess.run(  # noqa: S603 (a fixed command)
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOGINCTL_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.stdout.strip() == "yes"
