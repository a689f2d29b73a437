"""What a list of runs shows: the rows that a filter selects, their order, and the columns that it can have.

`tui.screens.runs` asks, in a thread for thousands of runs, and `gputrain runs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import is_, itemgetter
from typing import Any

from engine.base.errors import UsageError
from engine.base.text import pluralize, printable
from engine.runs.fields import (
    COMMAND_PREFIX,
    NO_NAMES,
    Field,
    Names,
    as_text,
    find_field,
    names_of,
)
from engine.runs.foreign_record import by_importance, known_keys
from engine.runs.keys import parse_key
from engine.runs.metrics import NO_METRICS
from engine.runs.monitor import record_monitor
from engine.runs.query import Query, parse_query
from engine.runs.run_row import RunRow
from engine.runs.trials import fold_trials, group_trials


@dataclass(frozen=True)
class SortOrder:
    """The order of a list: by a field, in its own direction (the best and the newest first) or `reverse`."""

    field: Field
    reverse: bool = False

    @classmethod
    def parse(cls, name: str, names: Names = NO_NAMES, *, reverse: bool = False) -> SortOrder:
        """Return the order by a key; a minus before it reverses. Raises UsageError for an unknown key."""
        is_reversed = name.startswith("-")
        return cls(find_field(parse_key(name.removeprefix("-")), names), reverse is not is_reversed)

    @property
    def descending(self) -> bool:
        """Whether large values come first."""
        return self.field.descending is not self.reverse

    def sort(self, rows: Iterable[RunRow]) -> list[RunRow]:
        """Return the rows in this order. Rows without a value come last in both directions; equal ones keep theirs."""
        numbers, texts, unknown = list[tuple[float, RunRow]](), list[tuple[str, RunRow]](), list[RunRow]()
        for row in rows:
            value = self.field.value(row)
            if self.field.name == "best" and value is not None:
                # The least value of a loss is the best one.
                value = record_monitor(row.record).merit(value)
            if value is None or value == ():
                unknown.append(row)
            elif isinstance(value, int | float):
                numbers.append((value, row))
            else:
                texts.append((as_text(value).casefold(), row))
        numbers.sort(key=itemgetter(0), reverse=self.descending)
        texts.sort(key=itemgetter(0), reverse=self.descending)
        # Numbers are less than texts.
        parts = [*texts, *numbers] if self.descending else [*numbers, *texts]
        return [*(row for _, row in parts), *unknown]


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
    """Filter and sort the rows."""
    keep_archived = request.archived or "archived" in query.fields
    known = [row for row in request.rows if keep_archived or not row.archived]
    matching = query.filter(known)
    if request.order is not None:
        matching = request.order.sort(matching)
    shown = matching if "sweep" in query.fields else fold_trials(matching, request.opened)
    keys, hidden = [row.folder for row in shown], len(request.rows) - len(known)
    return RunView(request, matching, shown, keys, len(known), hidden, query.text)


def same_rows(before: Sequence[RunRow], rows: Sequence[RunRow]) -> bool:
    """Whether the rows are the same objects."""
    return len(before) == len(rows) and all(map(is_, before, rows))


FIRST_COLUMNS = ("state", "age", "step")
MAX_METRIC_COLUMNS, MAX_PARAMETER_COLUMNS, MAX_ARGUMENT_COLUMNS, MAX_MEASURED_ROWS = 4, 8, 6, 500
MAX_TEXT_LENGTH = 24  # a longer value, such as a path, is no column that people compare
MAX_LISTED_METRICS = 2  # of commands in a list with few columns


def known_columns(columns: Iterable[str], names: Names = NO_NAMES) -> list[Field]:
    """Return the fields that are still known and printable: settings may be of another version, or damaged."""
    known: dict[str, Field] = {}
    for name in filter(str.isprintable, columns):
        with suppress(UsageError):
            field = find_field(name, names)
            known[field.name] = field
    return list(known.values())


def value_texts(rows: Iterable[RunRow], values: Callable[[RunRow], Mapping[str, Any]]) -> dict[str, dict[str, None]]:
    """Return the different values of each key that the rows have, as text, in their order."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for key, value in values(row).items():
            found.setdefault(key, {})[as_text(value)] = None
    return found


def commands_metrics(rows: Iterable[RunRow]) -> list[str]:
    """Return the keys of the most important metric of commands without a validation accuracy, those of most first."""
    records = [row.record for row in rows if row.record.command and row.record.values.get("best_val_accuracy") is None]
    known = ([key for key in record.metric_keys.values() if key != "lr"] for record in records)
    counts = Counter(key for keys in known for key in by_importance(keys)[:1])
    return [key for key, _ in counts.most_common(MAX_LISTED_METRICS)]


def run_columns(rows: Sequence[RunRow], *, is_foreign: bool = False) -> tuple[str, ...]:
    """Return the columns for a list of commands or of foreign runs without chosen ones: state, metrics of most runs,
    and the parameters that differ."""
    measured = rows[:: max(len(rows) // MAX_MEASURED_ROWS, 1)]
    # A column `lr` is the parameter.
    metrics = by_importance(key for key in known_keys(measured) if key != "lr")[:MAX_METRIC_COLUMNS]
    counts = Counter(key for row in measured for key in row.record.command_parameters)
    values = value_texts(measured, lambda row: row.record.command_parameters)

    def differs(key: str) -> bool:
        # What only some commands were given differs, too.
        is_partial = not is_foreign and counts[key] < len(measured)
        is_short = max(map(len, values[key])) <= MAX_TEXT_LENGTH
        return is_short and (len(values[key]) > 1 or is_partial or (not is_foreign and len(measured) == 1))

    differing = sorted(filter(differs, values), key=lambda key: (-counts[key] * is_foreign, key))
    if is_foreign:
        return (*FIRST_COLUMNS, *metrics, *differing[:MAX_PARAMETER_COLUMNS], "format")
    arguments = (COMMAND_PREFIX + key for key in differing[:MAX_ARGUMENT_COLUMNS])
    return ("state", "step", "age", *metrics, *arguments, "seconds", "command", "tags")
