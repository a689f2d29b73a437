"""The runs on the monitor: those that wait for GPUs, then all others, with the trials of a sweep as one row.

`tui.screens.monitor` shows them, and `tui.text.run_lines` and `tui.text.waiting` make their lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.text import Text

from engine.runs.run_row import RunRow
from engine.runs.trials import best_trial, fold_trials
from tui.screens.run_marks import RunMarks
from tui.text.run_lines import name_columns, run_line
from tui.text.waiting import WaitingRun
from tui.widgets.lines import Row


@dataclass(frozen=True)
class MonitorRuns:
    """The runs that match a filter. `shown` are the `matching` ones with one row per sweep."""

    waiting: Sequence[WaitingRun] = ()
    matching: Sequence[RunRow] = ()
    shown: Sequence[RunRow] = ()
    total: int = 0
    """Number of runs without the filter."""
    total_rows: int = 0
    """Number of rows without the filter."""

    @classmethod
    def select(cls, waiting: Sequence[WaitingRun], rows: Sequence[RunRow], query: str) -> MonitorRuns:
        """Return the runs whose name or state contains `query`."""
        matching = [row for row in rows if query in row.name.lower() or query in row.state] if query else rows
        shown = fold_trials(matching)
        total_rows = len(waiting) + len(fold_trials(rows) if query else shown)
        matching_waiting = [run for run in waiting if query in run.name.lower()]
        return cls(matching_waiting, matching, shown, len(waiting) + len(rows), total_rows)

    @property
    def count(self) -> int:
        """Number of runs that match."""
        return len(self.waiting) + len(self.matching)

    def runs_of(self, row: RunRow) -> list[RunRow]:
        """Return the runs that a row stands for: the matching trials of a sweep, else itself."""
        return [trial for trial in self.matching if trial.sweep == row.name] if row.trials else [row]

    def find(self, key: str | None) -> RunRow | None:
        """Return the row of a line that `lines` returned; None for a waiting run."""
        return next((row for row in self.shown if row.folder == key), None)

    def find_run(self, key: str | None) -> RunRow | None:
        """Return the run of a line, for a sweep its best trial."""
        row = self.find(key)
        return None if row is None else best_trial(self.runs_of(row))

    def is_waiting(self, key: str) -> bool:
        return any(run.key == key for run in self.waiting)

    def lines(self, width: int, marks: RunMarks) -> list[Row]:
        """Return a line for each row. Only those that are visible are made."""
        names = name_columns([*(run.name for run in self.waiting), *(row.name for row in self.shown)], width)

        def line(row: RunRow) -> Text:
            return run_line(row, names, width, marked=marks.contain(self.runs_of(row)))

        waiting = [Row(run.key, run.line(names)) for run in self.waiting]
        return waiting + [Row(row.folder, partial(line, row)) for row in self.shown]
