"""`gputrain evaluate --list` as a child process of the screen of the mistakes."""

from __future__ import annotations

import math
import os
import threading
import time

from engine.runs.folder import RunFolder
from engine.utils.errors import Problem
from engine.utils.helper_process import HelperExitedError, HelperProcess
from tui.launcher import CHILD_PROGRAM


class InspectCommand:
    """One `gputrain evaluate --list` of a run. `follow` blocks until its end; any thread may use the other members."""

    def __init__(self, folder: RunFolder, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        """`best` or `last`."""
        self.started = time.monotonic()
        self.error: Problem | None = None
        """Why the command failed."""
        self._arguments = ("evaluate", str(folder.path), "--list", "mistakes", "--checkpoint", checkpoint, "--json")
        self.ended = False
        self._lock = threading.Lock()
        self._process: HelperProcess | None = None
        self._canceled = False

    def follow(self) -> None:
        """Start the process and wait for its end. Sets `error` if it fails."""
        try:
            with self._lock:
                if self._canceled:
                    return
                # Linux kills the child when this thread ends.
                process = self._process = HelperProcess(CHILD_PROGRAM, *self._arguments, str(os.getpid()))
        except OSError as error:
            reason = f"gputrain evaluate cannot be started: {error.strerror or error}"
            self.error, self.ended = Problem("", reason, code="not-started"), True
            return
        try:
            while True:
                process.read_lines(math.inf)
        except HelperExitedError as error:
            if error.exit_code != 0 and not self._canceled:
                reason = error.last_line.removeprefix("error: ") or str(error)
                self.error = Problem("", reason, code="process-failed")
        finally:
            process.close()
            self.ended = True

    def cancel(self) -> None:
        """Kill the process. Returns at once."""
        with self._lock:
            self._canceled = True
            if self._process is not None:
                self._process.kill()
