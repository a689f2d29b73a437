"""`gputrain run --try-parse FILE`: which metrics a run would find in output like that of a file."""

from __future__ import annotations

from pathlib import Path

import typer

from tui.cli.run_command import CommandOptions


def show_try_parse(options: CommandOptions, *, as_json: bool) -> None:
    """Print which metrics `--parse` and the patterns of gputrain find in a file. Raises UsageError."""
    from dataclasses import asdict

    from engine.command.try_parse import try_parse
    from engine.utils.text import pluralize, printable
    from tui.cli.console import print_json, print_table
    from tui.tables.tried_metrics import TRIED_COLUMNS

    tried = try_parse(Path(str(options.try_parse)), options.parse)
    if as_json:
        found = {name: asdict(each) for name, each in tried.metrics.items()}
        lines, used, problem = tried.num_lines, tried.num_used, tried.problem
        print_json({"metrics": found, "lines": lines, "lines_used": used, "problem": problem})
        return
    if tried.metrics:
        print_table(TRIED_COLUMNS, list(tried.metrics.items()))
    typer.echo(f"{tried.num_used:,} of {pluralize(tried.num_lines, 'line')} have metrics", err=True)
    if tried.problem is not None:
        typer.echo(f"warning: {printable(tried.problem)}", err=True)
