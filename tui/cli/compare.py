"""`gputrain compare`: config keys that differ and metrics of several runs, as tables or JSON."""

from __future__ import annotations

from typing import Annotated

import typer

from engine.base.errors import Problem
from engine.base.text import pluralize
from engine.runs.root import runs_root
from tui.cli.command import command
from tui.cli.console import print_json, print_warning, reading_line, table_console
from tui.cli.options import (
    OR_PATH,
    BaselineOption,
    JsonOption,
    RunsDirOption,
    TrustOwnerOption,
    run_argument,
)
from tui.cli.run_options import find_any_runs, find_baseline


@command(
    [
        "gputrain compare digits-1 digits-2 --transpose",
        "gputrain compare digits-1 digits-2 digits-3 --baseline digits-1",
        "gputrain compare lightning_logs exp/adam    runs of other programs",
        "gputrain attach digits-1 last               the curves on the screen",
    ]
)
def compare(
    *,
    runs: Annotated[list[str], run_argument("RUN...", OR_PATH, reads=True)],
    baseline: BaselineOption = None,
    transpose: Annotated[bool, typer.Option("--transpose", help="Print a column a run, for a few runs.")] = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: the config keys that differ, and their results.

    Only keys that can change results are compared.
    Runs that differ in the seed alone are also summarized as mean and standard deviation. Differences of the recorded
    code follow: from the baseline, else from the first run.

    A path stands for all runs that other programs have written below it, as `gputrain watch PATH` lists them. Their
    parameters are compared, and the last and the best value of each metric. What they call val/loss or eval_loss is
    the metric val_loss, as for a run of gputrain. Accuracies in percent keep the name that they were logged with.
    """
    from engine.jobs.code.difference import code_differences
    from engine.report.foreign_run import as_foreign, read_run
    from engine.runs.comparison import compare_runs, require_comparable
    from engine.runs.metric_directions import read_directions
    from tui.cli.host_runs import read_host_run

    directions = read_directions(runs_root(runs_dir))
    others = {name: row for name in runs if ":" in name and (row := read_host_run(name)) is not None}
    found = find_any_runs([name for name in runs if name not in others], runs_dir, trust_owner=trust_owner)
    require_comparable(len(found) + len(others))
    number: int | None
    if baseline in others:
        number = len(found) + [*others].index(baseline)
    else:
        number = find_baseline(baseline, found, runs_dir, trust_owner=trust_owner)
    with reading_line(found) as on_read:
        rows = [*(read_run(as_foreign(run), on_read) for run in found), *others.values()]
        comparison = compare_runs(rows, directions)
    if others:
        print_warning(Problem("", "the code of runs on other hosts is not compared", code="not-supported"))
    for note in comparison.notes:
        print_warning(note)
    if as_json:
        print_json(comparison.to_dict(number))
        return
    from tui.screens.tables.compare import format_comparison

    typer.echo(format_comparison(comparison, table_console().width, number, transposed=transpose))
    for text in [] if others else code_differences(found, number or 0):
        typer.echo("\n".join(["", text.title, *(f"  {line}" for line in text.lines)]))
        if text.more:
            typer.echo(f"  … and {pluralize(text.more, 'more line')}")
