"""`gputrain watch`: the runs that other programs have recorded below a path."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.command import command
from tui.cli.options import JsonOption, count_option

if TYPE_CHECKING:
    from engine.foreign.folders import ForeignRun
    from engine.foreign.summary import RunSummary

WATCH_FORMAT = 1


@command(["gputrain watch lightning_logs", "gputrain watch runs/ wandb/ --json", "gputrain watch outputs -n 20"])
def watch(
    *,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Folder of runs, folder of a run, or a log.")],
    count: Annotated[int | None, count_option("runs")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the runs that other trainers have written below a path.

    Reads TensorBoard event files, CSV and JSON lines, Hugging Face's trainer_state.json, W&B's .wandb files, MLflow's
    file store and trackio's databases. It writes nothing there, runs nothing, and follows no link inside. The run that
    changed last comes first. --json prints each run with its parameters and, for each metric, the number of values,
    the last step and the last value.
    """
    from engine.foreign.folders import find_runs
    from engine.foreign.summary import summarize
    from engine.utils.errors import Problem, UsageError
    from engine.utils.files import expand_user
    from engine.utils.text import printable
    from tui.cli.console import print_table, print_warning
    from tui.tables.foreign_runs import FOREIGN_COLUMNS

    found: list[ForeignRun] = []
    for path in paths:
        root = expand_user(path)
        if not root.exists():
            raise UsageError.one(path, "is neither a folder nor a file", code="not-found")
        below = find_runs(root)
        found += below.runs
        if below.is_partial:
            print_warning(Problem(path, "has too many files or folders; not all are listed", code="too-many"))
    # A run may be below two of the paths.
    runs = list({(run.folder, run.name): run for run in found}.values())
    runs.sort(key=lambda run: -run.changed_at())
    summaries = [summarize(run) for run in runs[:count]]
    for summary in summaries:
        for problem in summary.problems:
            print_warning(Problem(summary.run.name, problem, code="damaged"))
    if as_json:
        typer.echo(json.dumps({"format": WATCH_FORMAT, "runs": [run_json(summary) for summary in summaries]}, indent=2))
    elif summaries:
        print_table(FOREIGN_COLUMNS, summaries)
    else:
        advice = "Formats that are read: gputrain watch --help"
        typer.echo(f"No run in {printable(', '.join(paths))}. {advice}", err=True)


def run_json(summary: RunSummary) -> dict[str, Any]:
    """Return a run as `gputrain watch --json` prints it."""
    from engine.utils.codec import finite

    return {
        "name": summary.run.name,
        "folder": str(summary.run.folder),
        "formats": list(summary.run.formats),
        "changed_at": summary.run.changed_at(),
        "parameters": {
            key: finite(value) if isinstance(value, float) else value for key, value in summary.parameters.items()
        },
        "metrics": [
            {
                "name": name,
                "count": len(metric.steps),
                "last_step": metric.steps[-1],
                "last_value": finite(metric.values[-1]),
            }
            for name, metric in summary.metrics.items()
        ],
        "problems": list(summary.problems),
    }
