"""The classes of a dataset for `gputrain data`."""

from __future__ import annotations

from dataclasses import dataclass

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
    is_total: bool = False


def count_columns(most: int) -> list[Column[ClassCount]]:
    """Return the columns for classes of at most `most` training images, which have a bar of full length."""
    return [
        Column("name", "class", lambda row: row.name),
        Column("train", "train", lambda row: format_count(row.train), Align.RIGHT, COUNT_COLUMNS),
        Column("val", "val", lambda row: format_count(row.val), Align.RIGHT, COUNT_COLUMNS),
        Column("bar", "", lambda row: "" if row.is_total else "█" * round(BAR_COLUMNS * row.train / most)),
    ]
