"""Reads everything about a run that a page or a figure shows, in one pass over its journal."""

from __future__ import annotations

from dataclasses import dataclass

from engine.runs.comparison import compared_row, read_flat_config
from engine.runs.curves import MAX_METRIC_COLUMNS, Curves
from engine.runs.find import OpenedRun
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.runs.journal_source import journal_run
from engine.runs.run_row import RunRow
from engine.show.foreign_run import OnRead, describe, read_whole


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run, of gputrain or foreign: what a comparison needs of it, and its curves in blocks."""

    row: RunRow
    curves: Curves


@dataclass(frozen=True, eq=False)
class OwnRun(ReportedRun):
    """A run of gputrain: also its folder and its history."""

    folder: RunFolder
    history: History


def read_reported_run(
    run: OpenedRun, max_columns: int = MAX_METRIC_COLUMNS, on_read: OnRead | None = None
) -> ReportedRun:
    """Read a run. Its curves have at most `max_columns` points and blocks each, so a long run takes no more space than
    a short one.

    A million `step` events take about 5 s. What cannot be read is a `problem` of `row`.
    """
    if not isinstance(run, RunFolder):
        reader = read_whole(run, on_read, max_columns)
        return ReportedRun(describe(reader), reader.curves)
    history = History()
    reader = read_whole(journal_run(run, on_event=history.add), max_columns=max_columns)
    problem = "; ".join(reader.problems) or None
    row = compared_row(run, history.record(), read_flat_config(run.config), problem)
    return OwnRun(row, reader.curves, run, history)
