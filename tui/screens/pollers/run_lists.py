"""The pollers of the lists of runs: those of a runs folder, and those that other programs record below some paths."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from engine.base.errors import UsageError
from engine.base.text import pluralize
from engine.jobs.queue.listing import QueueRow, list_queue
from engine.runs.folder import RunState
from engine.runs.foreign_record import make_foreign_row
from engine.runs.run_list import RunList
from engine.runs.run_row import RunRow
from engine.runs.run_view import FIRST_COLUMNS, run_columns
from engine.watch.folders import ForeignRun, FoundRuns, RunFinder, SearchLimits
from engine.watch.reading import NO_CHOICE, ColumnChoice
from engine.watch.run_list import ForeignRunList, ListedRun
from tui.screens.pollers.watched import POLL_INTERVAL_SECONDS, Poller

# A list is read in parts, short ones for the first page. Each part takes the time to sort the runs read so far.
FIRST_READ_SECONDS, FIRST_RUNS = 0.1, 100
READ_SECONDS, READ_PAUSE_SECONDS = 0.5, 0.02
# A part of a list of other programs that is being read, and what an open list may take of each second.
FOREIGN_READ_SECONDS, FOLLOW_SECONDS = 0.3, 0.1


class RowsPoller(Poller):
    """Publishes the rows of a list of runs: those of the first page soon, and all when the list is `complete`.

    No `Watched`: it publishes parts. The same list object means that no row has changed.
    """

    rows: list[RunRow] | None = None
    complete = False
    count = 0
    """Number of runs, read or not."""

    def poll(self) -> None:
        self.poll_part()
        while not self.complete and not self._stop_event.is_set():
            if self.on_first_result is not None:
                # For the first page; it is called again when all runs have been read.
                self.on_first_result()
            # Leaves the interpreter to the thread that draws.
            self._stop_event.wait(READ_PAUSE_SECONDS)
            self.poll_part()

    def poll_part(self) -> None:
        """Read for a moment, and publish what is known then."""
        raise NotImplementedError

    def has_result(self) -> bool:
        return self.complete

    @property
    def reading_text(self) -> str:
        """How many runs have been read, while some have not."""
        return f"{len(self.rows or ()):,} of {self.count:,} runs read …"


class RunListPoller(RowsPoller):
    """Publishes the runs in a folder, latest start first; `enabled = False` suspends it."""

    def __init__(self, runs_dir: Path, interval_s: float = POLL_INTERVAL_SECONDS) -> None:
        super().__init__("runs", interval_s)
        self._list = RunList(runs_dir)
        self.enabled = True
        self._check_all = False
        self.waiting: list[QueueRow] = []

    def request_poll(self) -> None:
        self._check_all = True
        super().request_poll()

    def poll(self) -> None:
        if self.enabled:
            super().poll()

    def poll_part(self) -> None:
        try:
            # A change by this program is shown at once.
            check_all, self._check_all = self._check_all, False
            seconds = FIRST_READ_SECONDS if len(self._list.rows) < FIRST_RUNS else READ_SECONDS
            self._list.poll(seconds, check_all=check_all)
        except UsageError as error:
            self.rows, self.problem, self.complete = [], error.problems[0], True
            return
        waiting = list_queue()
        self.rows, self.complete, self.count = self._list.rows, self._list.complete, self._list.count
        # Most runs of this user are among the rows, as waiting ones.
        folders = {row.folder for row in self._list.live_rows if row.state == RunState.WAITING}
        self.waiting = [run for run in waiting if run.folder not in folders]
        self.problem = None


class ForeignRunListPoller(RowsPoller):
    """Publishes the runs below some paths, the one that changed last first."""

    def __init__(
        self,
        paths: Collection[Path],
        interval_s: float = POLL_INTERVAL_SECONDS,
        choice: ColumnChoice | None = None,
    ) -> None:
        super().__init__("foreign runs", interval_s)
        limits = SearchLimits(names_unread=True, choice=choice or NO_CHOICE)
        self._finders = [RunFinder(path, limits) for path in paths]
        self._list = ForeignRunList(self._search)
        self._rows: dict[str, tuple[ListedRun, RunRow]] = {}
        self._listed: object = None
        self.visible: Collection[str] = ()
        """Keys of the runs that are read first."""
        self.columns: Sequence[str] = FIRST_COLUMNS
        """The columns without chosen ones."""
        self.has_searched = self.is_partial = False
        """Whether all runs have been found, and whether there are more than are searched for."""
        self.own: frozenset[Path] = frozenset()
        """Folders of the runs of gputrain that were found, which are not listed."""
        self.unread: tuple[str, ...] = ()
        """Sentences on files that look like metrics, and are not read."""

    def _search(self) -> Iterator[FoundRuns]:
        for finder in self._finders:
            yield from finder.search()

    def find_run(self, key: str) -> ForeignRun | None:
        """Return the run with this key (`RunRow.folder`)."""
        found = self._rows.get(key)
        return None if found is None else found[0].run

    def poll_part(self) -> None:
        first = FIRST_READ_SECONDS if self.rows is None else FOREIGN_READ_SECONDS
        self._list.poll(FOLLOW_SECONDS if self.complete else first, self.visible)
        if self._list.runs is not self._listed or self.rows is None:
            self._listed = self._list.runs
            self._publish(self._list.runs)
        self.count, self.own, self.unread = len(self._list.runs), self._list.own, self._list.unread
        self.is_partial, self.has_searched = self._list.is_partial, self._list.has_searched
        self.complete = self._list.complete

    def _publish(self, runs: Collection[ListedRun]) -> None:
        before, self._rows = self._rows, {}
        for listed in runs:
            known = before.get(listed.key)
            is_same = known is not None and known[0] is listed
            self._rows[listed.key] = known if known is not None and is_same else (listed, make_foreign_row(listed))
        rows = [row for _, row in self._rows.values()]
        self.columns = run_columns(rows, is_foreign=True)
        self.rows = rows

    @property
    def reading_text(self) -> str:
        if not self.has_searched:
            return f"{pluralize(self.count, 'run')} found …"
        return f"{self._list.num_read:,} of {self.count:,} runs read …"
