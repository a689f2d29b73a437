"""What the list of runs shows: the rows that a filter selects, in an order. `tui.screens.runs` asks, in a thread for
thousands of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from engine.runs.fields import known_names
from engine.runs.query import Query, SortOrder, parse_query
from engine.runs.run_row import RunRow
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


@dataclass(frozen=True)
class RunView:
    """The answer to a request: `shown` of the `total` rows, `keys` are their folders."""

    request: ViewRequest
    shown: Sequence[RunRow] = ()
    keys: Sequence[str] = ()
    total: int = 0
    hidden: int = 0
    """Number of archived runs that are hidden."""
    typed_key: str = ""
    """Beginning of a key at the end of the query, which no run matches as a word. It is not applied."""

    @property
    def count_text(self) -> str:
        """How many runs are shown: `3 of 12 match 'failed'`."""
        if self.typed_key:
            return f"{self.typed_key}… is a key: go on with = != > < or ~ and a value"
        if self.request.query:
            return f"{len(self.shown)} of {self.total} match '{printable(self.request.query)}'"
        hidden = f", {self.hidden} archived" if self.hidden else ""
        return pluralize(len(self.shown), "run") + hidden


@lru_cache(maxsize=32)
def query_of(text: str) -> Query | str:
    """Return the query of a text, or why it is none, in one line."""
    try:
        return parse_query(text)
    except UsageError as error:
        return "; ".join(str(problem) for problem in error.problems)


def make_view(request: ViewRequest, query: Query) -> RunView:
    """Filter and sort the rows."""
    keep_archived = request.archived or query.names_archived
    known = request.rows if keep_archived else [row for row in request.rows if not row.archived]
    shown, typed_key = query.filter(known), ""
    if not shown and (earlier := _without_key(query.text)) is not None:
        # The list does not vanish while `optim.name` is typed, before `=adamw` follows.
        shown, typed_key = earlier.filter(known), query.text.split()[-1]
    if request.order is not None:
        shown = request.order.sort(shown)
    hidden = len(request.rows) - len(known)
    return RunView(request, shown, [row.folder for row in shown], len(known), hidden, typed_key)


def _without_key(text: str) -> Query | None:
    """Return the query without its last word if that is the beginning of a key."""
    rest, _, word = text.rpartition(" ")
    if len(word) < MIN_KEY_LENGTH or not any(name.startswith(word.casefold()) for name in known_names()):
        return None
    query = query_of(rest)
    return query if isinstance(query, Query) else None
