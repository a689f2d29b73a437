"""The runs on the monitor: live ones, then those that wait, then ended ones, with the trials of a sweep as one row.

`tui.screens.monitor` shows them, and `tui.screens.tables.runs` and `tui.screens.tables.queue` make their lines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rich.text import Text

from engine.jobs.queue.listing import QueueRow
from engine.runs.folder import RunState
from engine.runs.run_row import RunRow
from engine.runs.trials import fold_trials
from tui.screens.tables import styled
from tui.screens.tables.queue import waiting_line
from tui.screens.tables.runs import fit_monitor_list, monitor_line, monitor_name_width
from tui.screens.widgets.lines import LazyRows

# The age of a run in a line is that old at most: of a run that ended in the last minute, and of others.
YOUNG_SECONDS, YOUNG_REFRESH_SECONDS, REFRESH_SECONDS = 60.0, 1.0, 20.0
MAX_YOUNG_RUNS = 50


class RunMarks:
    """Marks runs by their folders in `marked`, which the application keeps while the list is closed."""

    def __init__(self, marked: dict[str, None]) -> None:
        self._marked = marked
        self._rows: Sequence[RunRow] = ()
        self._rows_by_folder: dict[str, RunRow] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """The folders of the marked runs."""
        return tuple(self._marked)

    def rows(self, rows: Sequence[RunRow]) -> list[RunRow]:
        """Return the marked ones of all rows, in the order in which they were marked."""
        if not (marked := self._marked):
            return []
        if self._rows is not rows:
            self._rows, self._rows_by_folder = rows, {row.folder: row for row in rows}
        return [self._rows_by_folder[key] for key in marked if key in self._rows_by_folder]

    def contain(self, rows: Sequence[RunRow]) -> bool:
        """Whether all of the runs are marked."""
        return all(row.folder in self._marked for row in rows)

    def toggle(self, rows: Sequence[RunRow]) -> None:
        """Mark the runs; if all are marked, unmark them."""
        marked, keys = self._marked, [row.folder for row in rows]
        if self.contain(rows):
            for key in keys:
                del marked[key]
        else:
            marked.update(dict.fromkeys(keys))


@dataclass(frozen=True)
class MonitorRuns:
    """The runs that match a filter. `shown` are the `matching` ones with one row per sweep.

    Its lines are made once, so it is kept until the runs change.
    """

    all_waiting: Sequence[QueueRow] = ()
    rows: Sequence[RunRow] = ()
    query: str = ""
    waiting: Sequence[QueueRow] = ()
    matching: Sequence[RunRow] = ()
    shown: Sequence[RunRow] = ()
    num_running: int = 0
    """Number of `shown` rows before the waiting ones."""
    _lines: dict[tuple[object, ...], tuple[float, LazyRows]] = field(default_factory=dict, compare=False)
    """The latest lines, and until when they are valid."""

    def select(self, waiting: Sequence[QueueRow], rows: Sequence[RunRow], query: str) -> MonitorRuns:
        """Return the runs whose name or state contains `query`, without archived ones: the same object if nothing has
        changed."""
        if rows is self.rows and waiting == self.all_waiting and query == self.query:
            return self
        kept = [row for row in rows if not row.archived]
        matching = [row for row in kept if query in row.name.lower() or query in row.shown_state] if query else kept
        folded = fold_trials(matching)
        running = [row for row in folded if row.live and row.state != RunState.WAITING]
        pending = [row for row in folded if row.state == RunState.WAITING]
        ended = [row for row in folded if not row.live and row.state != RunState.WAITING]
        matching_waiting = [run for run in waiting if query in run.name.lower()]
        shown = [*running, *pending, *ended]
        return MonitorRuns(waiting, rows, query, matching_waiting, matching, shown, len(running))

    @cached_property
    def total(self) -> int:
        """Number of runs without the filter."""
        return len(self.all_waiting) + sum(not row.archived for row in self.rows)

    @property
    def count(self) -> int:
        """Number of runs that match."""
        return len(self.waiting) + len(self.matching)

    @cached_property
    def live(self) -> int:
        """Number of live runs that match, without those that wait."""
        return sum(row.live and row.state != RunState.WAITING for row in self.matching)

    @cached_property
    def num_waiting(self) -> int:
        """Number of waiting runs that match, of this user and of others."""
        return len(self.waiting) + sum(row.state == RunState.WAITING for row in self.matching)

    def runs_of(self, row: RunRow) -> list[RunRow]:
        """Return the runs that a row stands for: the matching trials of a sweep, else itself."""
        return [trial for trial in self.matching if trial.sweep == row.name] if row.trials else [row]

    def find(self, key: str | None) -> RunRow | None:
        """Return the row of a line that `lines` returned; None for a waiting run."""
        return next((row for row in self.shown if row.folder == key), None)

    def is_waiting(self, key: str) -> bool:
        return any(run.key == key for run in self.waiting)

    def lines(self, width: int, marks: RunMarks) -> LazyRows:
        """Return a line for each row. Only those that are visible are made, and again when their ages change."""
        wanted, now = (width, *marks.keys), time.monotonic()
        valid_until, lines = self._lines.get(wanted, (0.0, None))
        if lines is None or now >= valid_until:
            lines = self._make_lines(width, marks)
            ages = [row.age_seconds for row in self.shown[:MAX_YOUNG_RUNS] if not row.live]
            is_young = min(ages, default=YOUNG_SECONDS) < YOUNG_SECONDS
            self._lines.clear()
            self._lines[wanted] = now + (YOUNG_REFRESH_SECONDS if is_young else REFRESH_SECONDS), lines
        return lines

    def _make_lines(self, width: int, marks: RunMarks) -> LazyRows:
        names = monitor_name_width(self._widest_names(), width)
        table = fit_monitor_list(self.shown, names, width, lambda row: marks.contain(self.runs_of(row)))
        running = self.num_running
        rows: list[RunRow | QueueRow] = [*self.shown[:running], *self.waiting, *self.shown[running:]]

        def make_text(index: int) -> Text:
            row = rows[index]
            return waiting_line(row, names) if isinstance(row, QueueRow) else styled(monitor_line(table, row))

        return LazyRows([row.key if isinstance(row, QueueRow) else row.folder for row in rows], make_text)

    def _widest_names(self) -> Sequence[str]:
        """Return names whose widest is the widest of all, without measuring each of thousands."""
        names = [*(run.name for run in self.waiting), *(row.name for row in self.shown)]
        text = "".join(names)
        return [max(names, key=len)] if names and text.isascii() and text.isprintable() else names
