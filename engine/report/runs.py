"""Reads everything about a run that a page or a figure shows, in one pass over its journal."""

from __future__ import annotations

from dataclasses import dataclass

from engine.runs.comparison import ComparedRun, describe_run, read_flat_config
from engine.runs.curves import CurveData
from engine.runs.find import OpenedRun
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.runs.journal_follower import JournalFollower
from engine.runs.reduced_curves import MAX_BLOCKS, reduce_curves
from engine.show.foreign_run import Curves, KeyedCurves, OnRead, describe, read_whole


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run, of gputrain or foreign: what a comparison needs of it, and its curves in blocks."""

    compared: ComparedRun
    curves: Curves

    @property
    def name(self) -> str:
        return self.compared.name


@dataclass(frozen=True, eq=False)
class OwnRun(ReportedRun):
    """A run of gputrain: also its folder and its history."""

    folder: RunFolder
    history: History


@dataclass(frozen=True, eq=False)
class ForeignReport(ReportedRun):
    """A foreign run."""

    curves: KeyedCurves


def read_reported_run(run: OpenedRun, max_blocks: int = MAX_BLOCKS, on_read: OnRead | None = None) -> ReportedRun:
    """Read a run. Its curves have at most `max_blocks` blocks each, so a long run takes no more space than a short one.

    A million `step` events take about 5 s. What cannot be read is a `problem` of `compared`.
    """
    if not isinstance(run, RunFolder):
        reader = read_whole(run, on_read)
        return ForeignReport(describe(reader), KeyedCurves(reader.curves, max_blocks))
    journal, history, data = JournalFollower(run.journal), History(), CurveData()
    for event in journal.events():
        history.add(event)
        data.add(event)
    compared = describe_run(run, history.record(), read_flat_config(run.config), journal.problem)
    return OwnRun(compared, reduce_curves(data, max_blocks), run, history)
