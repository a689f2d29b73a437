"""`gputrain runs show`: what is known about one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from engine.utils.text import printable
from tui.cli.command import command
from tui.cli.options import CurvesOption, JsonOption
from tui.cli.run_options import reads_run

if TYPE_CHECKING:
    from engine.runs.folder import RunFolder


@command(["gputrain runs show last", "gputrain runs show fashion-17 --curves"])
@reads_run
def show(*, folder: RunFolder, curves: CurvesOption = False, as_json: JsonOption = False) -> None:
    """Print what is known about a run.

    Its state and why it ended, the metrics of the last and best epoch, hardware, owner, checkpoints, labels, and the
    config keys that it changed.

    --curves prints each point instead: metric, step, epoch, time and value. The time of a training is in seconds of
    training, of other programs in Unix seconds.
    """
    if curves:
        from engine.show.curve_points import point_rows, read_points
        from tui.cli.console import print_json, print_points

        points = read_points(folder)
        if as_json:
            print_json({"name": folder.name, "points": list(point_rows(points))})
        else:
            print_points(points)
        return
    from engine.runs.metric_directions import read_directions
    from engine.runs.record_completion import open_run
    from engine.runs.run_row import make_row
    from engine.show.outcome import find_outcome
    from engine.utils.codec import asdict
    from tui.cli.console import print_json, table_console
    from tui.tables import fact_lines
    from tui.tables.config import change_lines, config_changes
    from tui.tables.run_facts import run_facts

    row, directions = make_row(folder, *open_run(folder)), read_directions(folder.path.parent)
    outcome = find_outcome(folder, row, directions)
    if as_json:
        print_json(row.to_json() | asdict(outcome))
        return
    console = table_console()
    facts = {"name": printable(row.name)} | run_facts(row, folder, directions)
    for line in fact_lines(facts):
        typer.echo(line)
    if row.record.command:
        return
    typer.echo()
    for changed in change_lines(config_changes(row.record.config or {}), console.width):
        console.print(changed, soft_wrap=True)
