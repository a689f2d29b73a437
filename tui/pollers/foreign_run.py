"""Reads one run that another program records, in slices: its curves, its parameters and the end of its log."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from engine.foreign.activity import Activity, judge
from engine.foreign.folders import ForeignRun
from engine.foreign.log_file import find_log_file
from engine.runs.curve_reader import CurveReader
from engine.utils.files import file_stamp
from tui.pollers.runs import read_log_tail
from tui.pollers.watched import Poller, Watched

# What is written appears within 2 s: a poll, and the interval at which the screen draws.
POLL_INTERVAL_SECONDS = 0.3
LOG_INTERVAL_SECONDS = 1.0
# A thread that computes takes half of the interpreter from the one that draws: slices of 25 ms, with pauses while that
# one is busy.
SLICE_BYTES = 1 << 17
SLICE_PAUSE_SECONDS, BUSY_PAUSE_SECONDS, MAX_BUSY_PAUSES = 0.001, 0.01, 20


class ForeignRunPoller(Poller):
    """Publishes the curves of a run while it reads it, and follows it then.

    No `Watched`: it publishes between two slices.
    """

    def __init__(
        self,
        run: ForeignRun,
        is_busy: Callable[[], bool] = lambda: False,
        find: Callable[[], ForeignRun] | None = None,
    ) -> None:
        """`is_busy` tells whether the screen handles a key. `find` returns the run with the logs that it has
        by now."""
        super().__init__("foreign run", POLL_INTERVAL_SECONDS)
        self._is_busy, self._find = is_busy, find
        self.run = run
        self.reader = CurveReader(run)
        self.caught_up = False
        """Whether all logs have been read to their ends."""
        self.changed_at = 0.0
        """When a log was last written, in Unix seconds; 0 before the first poll, and if all logs are gone."""
        self.log_file: Path | None = None
        self._has_points = False
        self._log: Watched[tuple[str, ...]] | None = None
        self._next_log_poll = 0.0

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines of the log; none without one."""
        return (self._log.value or ()) if self._log is not None else ()

    def activity(self, writer_ended_at: float | None) -> Activity:
        """Whether the run goes on, by its logs and the end of the process that wrote them."""
        has_ended = self.reader.has_ended
        return judge(self.changed_at, time.time(), has_ended=has_ended, writer_ended_at=writer_ended_at)

    def poll(self) -> None:
        # Else the first drawing imports it in the event loop.
        import_module("plotext")
        if self._find is not None and (run := self._find()).log_ids() != self.run.log_ids():
            self.run, self.reader, self.caught_up = run, CurveReader(run), False
        self._poll_log()
        while not self._stop_event.is_set():
            has_more = self.reader.read_slice(SLICE_BYTES)
            self.changed_at = self.run.changed_at()
            if not has_more:
                break
            if self.on_first_result is not None and self.reader.curves.num_points and not self._has_points:
                # It is called again when the run has been read.
                self._has_points = True
                self.on_first_result()
            self._pause()
        self.caught_up = True

    def _pause(self) -> None:
        """Leave the interpreter to the screen. A key that is held slows the reading down, and does not stop it."""
        self._stop_event.wait(SLICE_PAUSE_SECONDS)
        for _ in range(MAX_BUSY_PAUSES):
            if not self._is_busy() or self._stop_event.wait(BUSY_PAUSE_SECONDS):
                break

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
