"""Reads the curves of a run from its logs: `tui.pollers` in a thread, reports and comparisons at once."""

from __future__ import annotations

from collections.abc import Callable

from engine.foreign.folders import ForeignRun, RunFollower
from engine.foreign.parameters import Parameters, merge_parameters
from engine.foreign.reading import POLL_BYTES
from engine.runs.curves import MAX_METRIC_COLUMNS, MAX_RUN_METRICS, Curves


class CurveReader:
    """Reads the curves of a run in slices, as long as somebody asks for more, and then what is appended."""

    def __init__(self, run: ForeignRun, max_columns: int = MAX_METRIC_COLUMNS) -> None:
        self.run = run
        self.curves = Curves(len(run.logs), max_columns)
        """The curves as far as they have been read."""
        self.share = 0.0
        """Part of the bytes that has been read, from 0 to 1."""
        self.problems: tuple[str, ...] = ()
        """What of the logs cannot be read."""
        self.logged_parameters: Parameters = {}
        self.has_ended = False
        """Whether a log says that the run has ended."""
        self.has_more = True
        """Whether there may be more to read now."""
        self._follower = RunFollower(run)
        self._read_bytes: list[int] = []
        self._parameters: Parameters | None = None

    def read(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Read all that is new, unless `stopped`; return whether there was any point."""
        version = self.curves.version
        while self.read_slice() and not stopped():
            pass
        return self.curves.version != version

    def parameters(self) -> Parameters:
        """Return the parameters in the logs and in the files beside them. Any thread may call it."""
        # A read in another thread may set `_parameters` to None at any time.
        parameters = self._parameters
        if parameters is None:
            parameters = self._parameters = self.run.read_parameters() | self.logged_parameters
        return parameters

    def read_slice(self, max_bytes: int = POLL_BYTES) -> bool:
        """Read at most about `max_bytes` of all logs. Return whether there may be more to read now."""
        readings = self._follower.poll(max_bytes)
        self.curves.add(readings)
        for reading in readings:
            self.logged_parameters = merge_parameters(self.logged_parameters, reading.parameters)
        self.has_ended = any(reading.has_ended for reading in readings)
        problems = [reading.problem for reading in readings if reading.problem]
        if self.curves.is_limited:
            problems.append(f"only the first {MAX_RUN_METRICS:,} metrics are read")
        self.problems = tuple(dict.fromkeys(problems))
        before, self._read_bytes = self._read_bytes, [reading.read_bytes for reading in readings]
        total = sum(reading.total_bytes for reading in readings)
        self.share = min(sum(self._read_bytes) / total, 1.0) if total else 1.0
        self.has_more = self._read_bytes != before or any(reading.points for reading in readings)
        self._parameters = None if self.has_more else self._parameters
        return self.has_more
