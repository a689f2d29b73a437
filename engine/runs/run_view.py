"""What the list of runs shows: the rows that a filter selects, in an order. `tui.screens.runs` asks, in a thread for
thousands of runs, and `gputrain runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import is_

from engine.runs.fields import NO_NAMES, Names, known_names, names_of
from engine.runs.metrics import NO_METRICS
from engine.runs.query import Query, parse_query
from engine.runs.run_row import RunRow
from engine.runs.sort_order import SortOrder
from engine.runs.trials import fold_trials, group_trials
from engine.utils.errors import UsageError
from engine.utils.text import pluralize, printable

# Fewer letters begin some key by chance.
MIN_KEY_LENGTH = 3


@dataclass(frozen=True)
class ViewRequest:
    """What the list is asked to show. `order` is None for the order of the rows, the newest run first."""

    rows: Sequence[RunRow]
    query: str = ""
    order: SortOrder | None = None
    archived: bool = False
    """Whether archived runs are shown."""
    minute: int = 0
    """Minute of the clock for a query that names the age; 0 for others."""
    opened: frozenset[str] = frozenset()
    """Names of the sweeps whose trials are shown below their row."""
    names: Names = NO_NAMES
    """What a query can name in the rows."""


@dataclass(frozen=True)
class RunView:
    """The answer to a request: the rows of the `total` that meet the query are `matching`.

    `shown` has one row for the trials of each sweep, and `keys` are the folders of `shown`.
    """

    request: ViewRequest
    matching: Sequence[RunRow] = ()
    shown: Sequence[RunRow] = ()
    keys: Sequence[str] = ()
    total: int = 0
    hidden: int = 0
    """Number of archived runs that are hidden."""
    query_text: str = ""
    """The query as far as it is applied."""

    @property
    def count_text(self) -> str:
        """How many runs are shown: `3 of 12 match 'failed'`."""
        if self.query_text:
            return f"{len(self.matching)} of {self.total} match '{printable(self.query_text)}'"
        hidden = f", {self.hidden} archived" if self.hidden else ""
        return pluralize(len(self.matching), "run") + hidden

    def runs_of(self, row: RunRow) -> list[RunRow]:
        """Return the runs that a shown row stands for: the matching trials of a sweep, else itself."""
        return self._trials.get(row.name, []) if row.trials else [row]

    @cached_property
    def _trials(self) -> dict[str, list[RunRow]]:
        """The matching trials of each sweep. Every visible line of a sweep needs its own."""
        return group_trials(self.matching)


class NamesFinder:
    """Finds what a query can name in the rows of a list, once for the same list. `directions` are those of their runs
    folder."""

    def __init__(self, *, is_foreign: bool = False) -> None:
        self.directions, self._is_foreign = NO_METRICS, is_foreign
        self._seen: tuple[object, object] = (None, None)
        self._found = NO_NAMES

    def find(self, rows: Sequence[RunRow]) -> Names:
        """Return the names of the rows."""
        if self._seen[0] is not rows or self._seen[1] is not self.directions:
            self._seen = (rows, self.directions)
            self._found = names_of(rows, self.directions, is_foreign=self._is_foreign)
        return self._found


@lru_cache(maxsize=32)
def query_of(text: str, names: Names = NO_NAMES) -> Query | str:
    """Return the query of a text, or why it is none, in one line."""
    try:
        return parse_query(text, names)
    except UsageError as error:
        return "; ".join(str(problem) for problem in error.problems)


def make_view(request: ViewRequest, query: Query) -> RunView:
    """Filter and sort the rows. While `optim.name` is typed, before `=adamw` follows, the list stays."""
    view = apply_query(request, query)
    earlier = None if view.matching else _without_key(query.text, request)
    return view if earlier is None else apply_query(request, earlier)


def apply_query(request: ViewRequest, query: Query) -> RunView:
    """Filter and sort the rows."""
    keep_archived = request.archived or "archived" in query.fields
    known = [row for row in request.rows if keep_archived or not row.archived]
    matching = query.filter(known)
    if request.order is not None:
        matching = request.order.sort(matching)
    shown = matching if "sweep" in query.fields else fold_trials(matching, request.opened)
    keys, hidden = [row.folder for row in shown], len(request.rows) - len(known)
    return RunView(request, matching, shown, keys, len(known), hidden, query.text)


def _without_key(text: str, request: ViewRequest) -> Query | None:
    """Return the query without its last word if that is the beginning of a key."""
    rest, _, word = text.rpartition(" ")
    names = map(str.casefold, known_names(request.names))
    if len(word) < MIN_KEY_LENGTH or not any(name.startswith(word.casefold()) for name in names):
        return None
    query = query_of(rest, request.names)
    return query if isinstance(query, Query) else None


def same_rows(before: Sequence[RunRow], rows: Sequence[RunRow]) -> bool:
    """Whether the rows are the same objects."""
    return len(before) == len(rows) and all(map(is_, before, rows))
