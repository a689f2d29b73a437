"""Threads behind the screen of the mistakes: one reads `inspection.npz`, the other runs `gputrain inspect`."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.runs.folder import RunFolder
from engine.utils.errors import Problem
from engine.utils.helper_process import HelperExitedError, HelperProcess
from tui.launcher import CHILD_PROGRAM
from tui.pollers import Poller
from tui.text.mistakes import ListKey

if TYPE_CHECKING:
    from engine.runs.inspection import Inspection, Rows

LIST_KEYS: tuple[ListKey, ...] = ("cell", "mistakes", "doubtful", "labels")
POLL_INTERVAL_SECONDS = 1.0
# Nobody reads more of a list, and an inspection may have millions of rows.
MAX_LISTED = 1000


@dataclass(frozen=True)
class InspectionLists:
    """An inspection, and the rows of each list. `cell_count` is the number of images of the cell, listed or not."""

    inspection: Inspection
    rows: Mapping[ListKey, Rows]
    cell_count: int


class InspectionPoller(Poller):
    """Publishes the lists of a run's inspection for one cell of the confusion matrix, and follows the file.

    Without a cell, its list is empty.
    """

    def __init__(self, folder: RunFolder, cell: tuple[int, int] | None) -> None:
        super().__init__("inspection", POLL_INTERVAL_SECONDS)
        self._folder, self._cell = folder, cell
        self._file_stamp: tuple[int, ...] | None = None
        self.latest: InspectionLists | None = None
        self.problem: Problem | None = None
        """Why the file cannot be used; None if it can, or if there is none."""
        self.is_live = False
        """Whether the run has an owner on this host that trains it."""
        self.has_polled = False

    def poll(self) -> None:
        from engine.runs.inspection_file import read_inspection
        from engine.utils.codec import InvalidRecordError

        self.is_live = self._folder.is_owned()
        try:
            status = self._folder.inspection.lstat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            self.latest, self.problem, self._file_stamp = None, None, None
        else:
            if stamp != self._file_stamp:
                self._file_stamp = stamp
                try:
                    inspection = read_inspection(self._folder)
                    self.latest = self._make_lists(inspection) if inspection is not None else None
                    self.problem = None
                except InvalidRecordError as error:
                    reason = f"{self._folder.inspection.name} {error}"
                    self.latest, self.problem = None, Problem("", reason, code=error.code)
        self.has_polled = True

    def _make_lists(self, inspection: Inspection) -> InspectionLists:
        rows: dict[ListKey, Rows] = {
            key: inspection.ranked(key, limit=MAX_LISTED) for key in LIST_KEYS if key != "cell"
        }
        classes = len(inspection.info.classes)
        true, predicted = self._cell if self._cell is not None and max(self._cell) < classes else (-1, -1)
        # The matrix is that of the validation images.
        cell = inspection.cell(true, predicted, "val")
        return InspectionLists(inspection, rows | {"cell": cell[:MAX_LISTED]}, len(cell))


class InspectCommand:
    """One `gputrain inspect` of a run. `follow` blocks until its end; any thread may use the other members."""

    def __init__(self, folder: RunFolder, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        """`best` or `last`."""
        self.started = time.monotonic()
        self.error: Problem | None = None
        """Why the command failed."""
        self._arguments = ("inspect", str(folder.path), "--checkpoint", checkpoint, "--json")
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
            reason = f"gputrain inspect cannot be started: {error.strerror or error}"
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
