"""The thread that reads a sweep for its screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.sweeps.folder import SweepFolder
from engine.utils.errors import Problem, UsageError
from tui.pollers import POLL_INTERVAL_SECONDS, Poller

if TYPE_CHECKING:
    from engine.sweeps.status import SweepReader, SweepStatus


class SweepPoller(Poller):
    """Publishes the latest status of one sweep, or the problem that prevents it."""

    def __init__(self, folder: SweepFolder, interval_s: float = POLL_INTERVAL_SECONDS) -> None:
        super().__init__("sweep", interval_s)
        self.folder = folder
        self.latest: SweepStatus | None = None
        self.problem: Problem | None = None
        self._reader: SweepReader | None = None

    def poll(self) -> None:
        # Imports Optuna and NumPy, which the first screen does not need.
        from engine.sweeps.status import SweepReader

        self._reader = self._reader or SweepReader(self.folder)
        try:
            self.latest, self.problem = self._reader.poll(), None
        except UsageError as error:
            self.problem = error.problems[0]

    def has_result(self) -> bool:
        return self.latest is not None
