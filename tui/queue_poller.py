"""The thread that reads the queue of this host for its screen."""

from __future__ import annotations

import time
from pathlib import Path

from engine.queue.listing import QueueRow, interrupted_rows, list_queue
from engine.utils.errors import Problem, UsageError
from tui.pollers import POLL_INTERVAL_SECONDS, Poller

# Reading the folders of thousands of runs takes longer than reading the queue.
INTERRUPTED_INTERVAL_SECONDS = 10.0


class QueuePoller(Poller):
    """Publishes the rows of the queue, or the problem that prevents it."""

    def __init__(self, runs_dir: Path, interval_s: float = POLL_INTERVAL_SECONDS) -> None:
        super().__init__("queue", interval_s)
        self._runs_dir = runs_dir
        self._interrupted: list[QueueRow] = []
        self._read_at: float | None = None
        self.rows: list[QueueRow] | None = None
        self.problem: Problem | None = None

    def request_full_poll(self) -> None:
        """Poll at once, the interrupted runs too."""
        self._read_at = None
        self.request_poll()

    def poll(self) -> None:
        try:
            if self._read_at is None or time.monotonic() - self._read_at > INTERRUPTED_INTERVAL_SECONDS:
                self._interrupted, self._read_at = interrupted_rows(self._runs_dir), time.monotonic()
            live = list_queue()
            folders = {row.folder for row in live}
            self.rows = live + [row for row in self._interrupted if row.folder not in folders]
            self.problem = None
        except UsageError as error:
            self.problem = error.problems[0]

    def has_result(self) -> bool:
        return self.rows is not None
