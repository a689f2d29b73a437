"""`gputrain compare`: config keys that differ and metrics of several runs, as tables, JSON or on the screen."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tui.cli.arguments import (
    RUN_HELP,
    BetterOption,
    JsonOption,
    LowBandwidthOption,
    RunsDirOption,
    TrustOwnerOption,
    exit_on_usage_error,
    print_warning,
)
from tui.cli.help import RUNS, HelpCommand, make_epilog

app = typer.Typer()


@app.command(
    cls=HelpCommand,
    rich_help_panel=RUNS,
    epilog=make_epilog(
        [
            "gputrain compare digits-1 digits-2",
            "gputrain compare digits-1 digits-2 digits-3 --baseline digits-1",
            "gputrain compare digits-1 last --screen",
        ]
    ),
)
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN [RUN]...", help=f"{RUN_HELP}\nMore runs, compared in this order.")
    ],
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="RUN", help="Show the differences from this run.")
    ] = None,
    screen: Annotated[bool, typer.Option("--screen", help="Open the screen with the curves of the runs.")] = False,
    better: BetterOption = None,
    runs_dir: RunsDirOption = None,
    low_bandwidth: LowBandwidthOption = False,
    as_json: JsonOption = False,
    trust_owner: TrustOwnerOption = False,
) -> None:
    """Compare runs: the config keys that differ, and their results.

    Runs that differ in the seed alone are also summarized as mean and standard deviation.
    """
    from engine.runs.comparison import compare_runs, read_run, require_comparable
    from engine.runs.find import find_run
    from engine.runs.folder import runs_root
    from engine.runs.metric_directions import read_directions
    from engine.utils.errors import UsageError

    with exit_on_usage_error():
        root = runs_root(runs_dir)
        directions = read_directions(root, better or ())
        found = [find_run(root, run, trust_owner=trust_owner) for run in runs]
        folders = list({folder.path: folder for folder in found}.values())
        require_comparable(len(folders))
        number = None
        if baseline is not None:
            pinned = find_run(root, baseline, trust_owner=trust_owner).path
            paths = [folder.path for folder in folders]
            if pinned not in paths:
                raise UsageError.one(
                    "--baseline",
                    f"{pinned.name} is not among the compared runs; name it as a RUN, too",
                    code="unknown-value",
                )
            number = paths.index(pinned)
        if screen and better:
            advice = "store the direction with `gputrain runs better NAME low`"
            raise UsageError.one("--better", "cannot be combined with --screen", advice, code="conflict")
        if screen:
            from tui.cli.open_tui import open_screen

            paths = [folder.path for folder in folders]
            open_screen(runs_dir, compared=paths, baseline=number, low_bandwidth=low_bandwidth)
        comparison = compare_runs([read_run(folder) for folder in folders], directions)
    for note in comparison.notes:
        print_warning(note)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict(number), indent=2))
        return
    from tui.cli.console import table_console
    from tui.tables.compare import format_comparison

    typer.echo(format_comparison(comparison, table_console().width, number))
