"""What the screens watch besides runs: evaluations, inspections, profiles, the queue and sweeps.

Each `watch_…` function returns a poller, which the screen shows and `tui.screens.base` starts.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.base.codec import InvalidRecordError
from engine.base.errors import Problem, UsageError
from engine.base.files import file_size, file_stamp
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.selection import CPU
from engine.jobs.queue.listing import QueueRow, list_queue, stored_rows
from engine.runs.folder import RunFolder
from tui.screens.pollers.watched import POLL_INTERVAL_SECONDS, Watched
from tui.screens.tables.mistakes import ListKey

if TYPE_CHECKING:
    from engine.jobs.sweeps.folder import SweepFolder
    from engine.jobs.sweeps.status import SweepReader, SweepStatus
    from engine.runs.evaluations import EvaluationFile
    from engine.runs.inspection import Inspection, Rows
    from engine.runs.journal import JournalReader
    from engine.runs.profile_file import Profile

PROFILE_INTERVAL_SECONDS = 0.5
# Reading the folders of thousands of runs takes longer than reading the queue.
STORED_INTERVAL_SECONDS = 10.0
LIST_KEYS: tuple[ListKey, ...] = ("cell", "mistakes", "uncertain", "label-issues")
# Nobody reads more of a list, and an inspection may have millions of rows.
MAX_LISTED = 1000


def watch_evaluations(folder: RunFolder) -> Watched[EvaluationFile]:
    """Watch the evaluations of a run."""
    # Imports NumPy, which the first screen does not need.
    from engine.runs.evaluations import read_evaluations

    path = folder.evaluation
    return Watched(path.name, partial(read_evaluations, path), partial(file_stamp, path))


@dataclass(frozen=True)
class InspectionLists:
    """An inspection, and the rows of each list."""

    inspection: Inspection
    rows: Mapping[ListKey, Rows]


def watch_inspection(folder: RunFolder, cell: tuple[int, int] | None) -> Watched[InspectionLists]:
    """Watch the inspection of a run and list its images: all of them, and those in one cell of the confusion matrix.

    Without a cell, the list of the cell is empty.
    """
    path = folder.inspection
    return Watched(path.name, partial(_read_lists, folder, cell), partial(file_stamp, path))


def _read_lists(folder: RunFolder, cell: tuple[int, int] | None) -> InspectionLists | None:
    from engine.runs.inspection import read_inspection

    inspection = read_inspection(folder)
    if inspection is None:
        return None
    # The confusion matrix counts validation images only.
    rows: dict[ListKey, Rows] = {"cell": inspection.cell(*(cell or (-1, -1)), "val", MAX_LISTED)}
    rows |= {key: inspection.ranked(key, limit=MAX_LISTED) for key in LIST_KEYS if key != "cell"}
    return InspectionLists(inspection, rows)


class ProfileReader:
    """Reads the newest profile of a run, and waits for the answer to a request for another one."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._name = ""
        self._answers: JournalReader | None = None
        self.is_live = False
        """Whether a process owns the run."""
        self.asked_at: float | None = None
        """When a profile was requested, in seconds of the monotonic clock; None if no request is unanswered."""
        self.answer: Problem | None = None
        """Why the latest request gave no profile; None if it did."""

    def expect_profile(self) -> None:
        """Wait for the answer to a request that is sent now."""
        from engine.runs.journal import JournalReader

        reader = JournalReader(self._folder.journal)
        reader.offset = file_size(self._folder.journal)
        self._answers, self.asked_at, self.answer = reader, time.monotonic(), None

    def forget_request(self) -> None:
        """Wait no longer, because the request could not be sent."""
        self._answers = self.asked_at = None

    def stamp(self) -> Hashable:
        """Return what the profile depends on, None if there is none; look for the answer to a request."""
        from engine.runs.profile_file import RECORD_NAME, list_profiles

        self.is_live = self._folder.is_owned()
        self._poll_answer()
        if not (names := list_profiles(self._folder)):
            return None
        self._name = names[0]
        # There is no record while the run writes it.
        record = file_stamp(self._folder.profiles / names[0] / RECORD_NAME)
        return None if record is None else (names[0], record)

    def read(self) -> tuple[str, Profile]:
        """Return the newest profile and the name of its folder. Raises UsageError."""
        from engine.runs.profile_file import read_profile

        try:
            return self._name, read_profile(self._folder, self._name)
        except InvalidRecordError as error:
            raise UsageError.one("", f"{self._name} {error}", code=error.code) from error

    def _poll_answer(self) -> None:
        from engine.runs.events import Profiled

        if self._answers is None:
            return
        answer = next((event for event in self._answers.poll() if isinstance(event, Profiled)), None)
        if answer is not None:
            reason = f"No profile was taken: {answer.message}"
            self.answer = None if answer.folder else Problem("", reason, code="not-recorded")
        elif not self.is_live:
            self.answer = Problem("", "The run ended before the profile", code="not-running")
        else:
            return
        self.forget_request()


def watch_profile(reader: ProfileReader) -> Watched[tuple[str, Profile]]:
    """Watch the newest profile."""
    return Watched("profile", reader.read, reader.stamp, PROFILE_INTERVAL_SECONDS)


class QueueReader:
    """Reads the queue of this host in each poll, and the jobs and interrupted runs of a folder less often."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._stored: list[QueueRow] = []
        self._read_at: float | None = None
        self.cpu_holders: tuple[str, ...] = ()
        """The runs that hold the CPU, for which others wait."""

    def forget_stored(self) -> None:
        """Read the runs of the folder in the next poll."""
        self._read_at = None

    def read(self) -> list[QueueRow]:
        """Return the rows of the queue. Raises UsageError."""
        if self._read_at is None or time.monotonic() - self._read_at > STORED_INTERVAL_SECONDS:
            self._stored, self._read_at = stored_rows(self._runs_dir), time.monotonic()
        live = list_queue()
        self.cpu_holders = tuple(each.run for each in read_reservations() if each.holds(CPU.uuid))
        folders = {row.folder for row in live}
        return live + [row for row in self._stored if row.folder not in folders]


def watch_sweep(folder: SweepFolder, interval_s: float = POLL_INTERVAL_SECONDS) -> Watched[SweepStatus]:
    """Watch the status of a sweep."""
    reader: SweepReader | None = None

    def stamp() -> Hashable:
        # The status depends on the clock and on processes, not only on the file.
        return None if file_stamp(folder.settings) is None else object()

    def read() -> SweepStatus:
        # Imports Optuna and NumPy, which the first screen does not need.
        from engine.jobs.sweeps.status import SweepReader

        nonlocal reader
        reader = reader or SweepReader(folder)
        return reader.poll()

    return Watched("sweep", read, stamp, interval_s)
