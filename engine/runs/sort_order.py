"""The order of a list of runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from engine.runs.fields import NO_NAMES, Field, Names, as_text, find_field
from engine.runs.keys import parse_key
from engine.runs.run_row import RunRow


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
