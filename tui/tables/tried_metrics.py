"""The metrics that `gputrain run --try-parse` finds in a file, for the command line."""

from __future__ import annotations

from engine.command.try_parse import TriedMetric
from engine.show.table import Align, Column
from engine.utils.units import format_count, format_number
from tui.palette import STRONG

TriedRow = tuple[str, TriedMetric]

TRIED_COLUMNS: tuple[Column[TriedRow], ...] = (
    Column("name", "metric", lambda row: row[0], priority=1, style=STRONG),
    Column("count", "values", lambda row: format_count(row[1].count), Align.RIGHT),
    Column("first_step", "first step", lambda row: format_count(row[1].first_step), Align.RIGHT),
    Column("last_step", "last step", lambda row: format_count(row[1].last_step), Align.RIGHT),
    Column("last", "last", lambda row: format_number(row[1].last), Align.RIGHT),
)
