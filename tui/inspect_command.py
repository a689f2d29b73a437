"""`gputrain evaluate --list` as a child process of the screen of the mistakes."""

from __future__ import annotations

import math
import os
import time

from engine.runs.folder import RunFolder
from engine.utils.helper_process import HelperExitedError, HelperProcess
from tui.launcher import CHILD_PROGRAM


class InspectCommand:
    """One `gputrain evaluate --list` of a run. `follow` blocks until its end; any thread may use the other members."""

    def __init__(self, folder: RunFolder, checkpoint: str) -> None:
        """Start the command with the checkpoint `best` or `last`. Linux kills it when the calling thread ends."""
        self.checkpoint, self.started = checkpoint, time.monotonic()
        self.error = ""
        """Why the command failed."""
        self.ended = self._canceled = False
        options = ("--list", "mistakes", "--checkpoint", checkpoint, "--json")
        self._process = HelperProcess(CHILD_PROGRAM, "evaluate", str(folder.path), *options, str(os.getpid()))

    def follow(self) -> None:
        """Wait for the end of the process. Sets `error` if it fails."""
        try:
            while True:
                self._process.read_lines(math.inf)
        except HelperExitedError as error:
            if error.exit_code != 0 and not self._canceled:
                self.error = error.last_line.removeprefix("error: ") or str(error)
        self._process.close()
        self.ended = True

    def cancel(self) -> None:
        """Kill the process. Returns at once."""
        self._canceled = True
        self._process.kill()
