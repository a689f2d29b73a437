"""`gputrain run --try-parse FILE`: which metrics a run would find in output like that of a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from engine.base.text import pluralize
from engine.base.units import format_count, format_number
from engine.jobs.command.try_parse import TriedMetric, try_parse
from engine.report.table import Align, Column
from tui.cli.console import print_json, print_table
from tui.cli.run_command import CommandOptions
from tui.terminal.palette import STRONG

TriedRow = tuple[str, TriedMetric]

TRIED_COLUMNS: tuple[Column[TriedRow], ...] = (
    Column("name", "metric", lambda row: row[0], priority=1, style=STRONG),
    Column("count", "values", lambda row: format_count(row[1].count), Align.RIGHT),
    Column("first_step", "first step", lambda row: format_count(row[1].first_step), Align.RIGHT),
    Column("last_step", "last step", lambda row: format_count(row[1].last_step), Align.RIGHT),
    Column("last", "last", lambda row: format_number(row[1].last), Align.RIGHT),
)


def show_try_parse(options: CommandOptions, *, as_json: bool) -> None:
    """Print which metrics `--parse` and the patterns of gputrain find in a file. Raises UsageError."""

    from tui.screens.tables.tried_formats import format_lines

    tried = try_parse(Path(str(options.try_parse)), options.parse)
    if as_json:
        found = {name: asdict(each) for name, each in tried.metrics.items()}
        formats = [
            {"example": each.example, "records": each.count, "points": [point._asdict() for point in each.points]}
            for each in tried.formats.values()
        ]
        counts = {"lines": tried.num_lines, "lines_used": tried.num_used, "lines_unread": tried.num_unread}
        print_json({"metrics": found, "formats": formats, "notes": tried.notes, "unread": tried.unread, **counts})
        return
    if tried.metrics:
        print_table(TRIED_COLUMNS, list(tried.metrics.items()))
    for line in format_lines(tried):
        typer.echo(line)
    typer.echo(f"{tried.num_used:,} of {pluralize(tried.num_lines, 'line')} have metrics", err=True)
