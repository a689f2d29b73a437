"""Reads one run that another program records, in slices: its curves, its parameters and the end of its log."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from engine.foreign.activity import Activity, judge
from engine.foreign.folders import ForeignRun
from engine.foreign.log_file import find_log_file
from engine.foreign.parameters import Parameters
from engine.show.foreign_curves import CurveReader
from engine.utils.files import file_stamp
from tui.pollers.runs import read_log_tail
from tui.pollers.watched import Poller, Watched

# What is written appears within 2 s: a poll, and the interval at which the screen draws.
POLL_INTERVAL_SECONDS = 0.3
LOG_INTERVAL_SECONDS = 1.0
# Leaves the interpreter to the thread that draws.
SLICE_PAUSE_SECONDS = 0.001


class ForeignRunPoller(Poller):
    """Publishes the curves of a run while it reads it, and follows it then.

    No `Watched`: it publishes between two slices.
    """

    def __init__(self, run: ForeignRun, interval_s: float = POLL_INTERVAL_SECONDS) -> None:
        super().__init__("foreign run", interval_s)
        self.run = run
        self.reader = CurveReader(run)
        self.caught_up = False
        """Whether all logs have been read to their ends."""
        self.changed_at = 0.0
        """When a log was last written, in Unix seconds; 0 before the first poll, and if all logs are gone."""
        self.log_file: Path | None = None
        self._log: Watched[tuple[str, ...]] | None = None
        self._next_log_poll = 0.0

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines of the log; none without one."""
        return (self._log.value or ()) if self._log is not None else ()

    @property
    def activity(self) -> Activity:
        """Whether the run goes on, by its logs alone."""
        return judge(self.changed_at, time.time(), has_ended=self.reader.has_ended)

    def read_parameters(self) -> Parameters:
        """Read the files with parameters. Those in the logs come first."""
        return self.run.read_parameters() | self.reader.logged_parameters

    def poll(self) -> None:
        self._poll_log()
        while not self._stop_event.is_set():
            has_more = self.reader.read_slice()
            self.changed_at = self.run.changed_at()
            if not has_more:
                break
            if self.on_first_result is not None and self.reader.curves.num_points:
                # For the first points; it is called again when the run has been read.
                self.on_first_result()
            self._stop_event.wait(SLICE_PAUSE_SECONDS)
        self.caught_up = True

    def _poll_log(self) -> None:
        if time.monotonic() < self._next_log_poll:
            return
        self._next_log_poll = time.monotonic() + LOG_INTERVAL_SECONDS
        path = find_log_file(self.run)
        if path is None:
            self._log = None
        elif path != self.log_file:
            self._log = Watched(path.name, partial(read_log_tail, path), partial(file_stamp, path))
        self.log_file = path
        if self._log is not None:
            self._log.poll()

    def has_result(self) -> bool:
        return self.caught_up
