"""The classes of a dataset for `gputrain data`."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.show.table import Align, Column
from engine.utils.units import format_count

BAR_COLUMNS = 30
COUNT_COLUMNS = 7


@dataclass(frozen=True)
class ClassCount:
    """A class and its number of images in each part; the last row has the totals."""

    name: str
    train: int
    val: int
    test: int = 0
    is_total: bool = field(default=False, kw_only=True)


def count_columns(most: int, *, has_test: bool) -> list[Column[ClassCount]]:
    """Return the columns for classes of at most `most` training images, which have a bar of full length."""
    test = Column[ClassCount]("test", "test", lambda row: format_count(row.test), Align.RIGHT, COUNT_COLUMNS)
    return [
        Column("name", "class", lambda row: row.name),
        Column("train", "train", lambda row: format_count(row.train), Align.RIGHT, COUNT_COLUMNS),
        Column("val", "val", lambda row: format_count(row.val), Align.RIGHT, COUNT_COLUMNS),
        *([test] if has_test else []),
        Column("bar", "", lambda row: "" if row.is_total else "█" * round(BAR_COLUMNS * row.train / most)),
    ]
