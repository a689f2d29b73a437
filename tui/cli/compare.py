"""`gputrain compare`: config keys that differ and metrics of several runs, as tables or JSON."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from engine.runs.root import runs_root
from tui.cli.command import command
from tui.cli.options import (
    BaselineOption,
    BetterOption,
    JsonOption,
    RunsDirOption,
    TrustOwnerOption,
    run_argument,
)
from tui.cli.run_options import find_baseline, find_runs


@command(
    [
        "gputrain compare digits-1 digits-2",
        "gputrain compare digits-1 digits-2 digits-3 --baseline digits-1",
        "gputrain attach digits-1 last      the curves on the screen",
    ]
)
def compare(
    *,
    runs: Annotated[list[str], run_argument("RUN...")],
    baseline: BaselineOption = None,
    better: BetterOption = None,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: the config keys that differ, and their results.

    Runs that differ in the seed alone are also summarized as mean and standard deviation.
    """
    from engine.runs.comparison import compare_runs, read_run, require_comparable
    from engine.runs.metric_directions import read_directions
    from tui.cli.console import print_warning

    directions = read_directions(runs_root(runs_dir), better or ())
    folders = find_runs(runs, runs_dir, trust_owner=trust_owner)
    require_comparable(len(folders))
    number = find_baseline(baseline, folders, runs_dir, trust_owner=trust_owner)
    comparison = compare_runs([read_run(folder) for folder in folders], directions)
    for note in comparison.notes:
        print_warning(note)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict(number), indent=2))
        return
    from tui.cli.console import table_console
    from tui.tables.compare import format_comparison

    typer.echo(format_comparison(comparison, table_console().width, number))
