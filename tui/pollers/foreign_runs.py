"""The poller of the list of runs that other programs record, with the interface of `RunListPoller`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from engine.foreign.folders import ForeignRun, FoundRuns, RunFinder
from engine.foreign.run_list import ForeignRunList, ListedRun
from engine.runs.foreign_rows import default_columns, make_foreign_row, parameter_names
from engine.runs.run_row import RunRow
from engine.utils.errors import Problem
from tui.pollers.runs import FIRST_READ_SECONDS, READ_PAUSE_SECONDS
from tui.pollers.watched import POLL_INTERVAL_SECONDS, Poller

# A part of a list that is being read, and what an open list may take of each second.
READ_SECONDS, FOLLOW_SECONDS = 0.3, 0.1

Search = Callable[[], Iterator[FoundRuns]]


def search_paths(paths: Collection[Path]) -> Search:
    """Return the search of the runs below some paths."""
    finders = [RunFinder(path) for path in paths]
    return lambda: chain.from_iterable(finder.search() for finder in finders)


@dataclass(frozen=True)
class ListNames:
    """What the rows of a list have: the names of their parameters, and the columns without chosen ones."""

    parameters: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


class ForeignRunListPoller(Poller):
    """Publishes the rows of the runs that a search finds, the one that changed last first.

    The same list object means that no row has changed, and the same row that its run has not.
    """

    def __init__(self, search: Search, interval_s: float = POLL_INTERVAL_SECONDS) -> None:
        super().__init__("foreign runs", interval_s)
        self._list = ForeignRunList(search)
        self._rows: dict[str, tuple[ListedRun, RunRow]] = {}
        self._listed: object = None
        self.visible: Collection[str] = ()
        """Keys of the runs that are read first."""
        self.rows: list[RunRow] | None = None
        self.names = ListNames()
        self.complete = False
        """Whether all runs have been found and read."""
        self.has_searched = False
        """Whether all runs have been found."""
        self.count = self.num_read = 0
        """Numbers of runs: known, and read."""
        self.problem: Problem | None = None
        self.is_partial = False
        """Whether there are more runs than are searched for."""
        self.own: frozenset[Path] = frozenset()
        """Folders of the runs of gputrain that were found, which are not listed."""

    def find_run(self, key: str) -> ForeignRun | None:
        """Return the run with this key (`RunRow.folder`)."""
        found = self._rows.get(key)
        return None if found is None else found[0].run

    def poll(self) -> None:
        is_first = self.rows is None
        self._poll_once(FIRST_READ_SECONDS if is_first else FOLLOW_SECONDS)
        while not self.complete and not self._stop_event.is_set():
            if self.on_first_result is not None:
                # For the first page; it is called again when all runs have been read.
                self.on_first_result()
            # Leaves the interpreter to the thread that draws.
            self._stop_event.wait(READ_PAUSE_SECONDS)
            self._poll_once(READ_SECONDS)

    def _poll_once(self, seconds: float) -> None:
        self._list.poll(seconds, self.visible)
        if self._list.runs is not self._listed or self.rows is None:
            self._listed = self._list.runs
            self._publish(self._list.runs)
        self.count, self.num_read = len(self._list.runs), self._list.num_read
        self.is_partial, self.has_searched = self._list.is_partial, self._list.has_searched
        self.own = self._list.own
        self.complete = self._list.complete

    def _publish(self, runs: Collection[ListedRun]) -> None:
        before, self._rows = self._rows, {}
        for listed in runs:
            known = before.get(listed.key)
            is_same = known is not None and known[0] is listed
            self._rows[listed.key] = known if known is not None and is_same else (listed, make_foreign_row(listed))
        rows = [row for _, row in self._rows.values()]
        names = ListNames(parameter_names(rows), default_columns(rows))
        if names != self.names:
            self.names = names
        self.rows = rows

    def has_result(self) -> bool:
        return self.complete
