"""A foreign run in the form of our own: a description for comparisons and reports.

`engine.runs.curves` reads its curves. Metrics that the registry does not have are `metrics.NAME`, like the user's
own ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.base.codec import replace
from engine.jobs.command.metric_files import CommandMetrics
from engine.jobs.command.run_metrics import metrics_of_run
from engine.runs.curves import MAX_METRIC_COLUMNS, CurveReader
from engine.runs.find import OpenedRun
from engine.runs.folder import RunFolder, RunState
from engine.runs.foreign_record import foreign_row
from engine.runs.run_record import NO_RECORD, RunRecord, read_run_record
from engine.runs.run_row import RunRow, open_run
from engine.watch.activity import Activity, judge
from engine.watch.folders import ForeignRun

OnRead = Callable[[ForeignRun, float], object]
"""What is called while a run is read, with the part of it that has been read, from 0 to 1."""


def describe(reader: CurveReader) -> RunRow:
    """Return what a comparison needs of a run, as far as it has been read: of a command, with all else that is recorded
    of its run."""
    run, curves = reader.run, reader.curves
    is_command = isinstance(run, CommandMetrics)
    record = _stored_record(run) if is_command else replace(NO_RECORD, updated_at=run.changed_at())
    row = foreign_row(run, record, curves.values(curves.names), reader.parameters(), find_state(reader))
    return row._replace(problem="; ".join(reader.problems) or None)


def find_state(reader: CurveReader) -> Activity | RunState:
    """Return whether a run goes on; of a command, the state of its run."""
    run = reader.run
    if isinstance(run, CommandMetrics):
        return RunFolder(run.folder).state(_stored_record(run).state)
    return judge(run.changed_at(), time.time(), has_ended=reader.has_ended)


def _stored_record(run: ForeignRun) -> RunRecord:
    return read_run_record(RunFolder(run.folder)) or NO_RECORD


def as_foreign(run: OpenedRun) -> OpenedRun:
    """Return the metrics of a run of a command, which are read as those of a foreign run; any other run as it is."""
    return (metrics_of_run(run) or run) if isinstance(run, RunFolder) else run


def read_run(run: OpenedRun, on_read: OnRead | None = None) -> RunRow:
    """Read one run for a comparison: its record, or all of a foreign run."""
    if isinstance(run, RunFolder):
        return open_run(run)
    return describe(read_whole(run, on_read))


def read_whole(run: ForeignRun, on_read: OnRead | None = None, max_columns: int = MAX_METRIC_COLUMNS) -> CurveReader:
    """Read all points and parameters of a run. A curve has at most `max_columns` points and blocks."""
    reader = CurveReader(run, max_columns)

    def report() -> bool:
        if on_read is not None:
            on_read(run, reader.share)
        return False

    reader.read(stopped=report)
    return reader
