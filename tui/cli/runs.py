"""`gputrain attach` and `gputrain logs`: watch runs on the screen, and read the log of one."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from engine.base.codec import asdict
from engine.base.errors import UsageError
from engine.base.files import expand_user
from engine.base.text import printable
from engine.runs.folder import RunFolder
from engine.runs.log import open_log
from engine.runs.root import LAST_RUN
from tui.cli.command import command
from tui.cli.console import is_read_for, print_json, print_lines, print_points, print_points_json, table_console
from tui.cli.options import (
    OR_PATH,
    CurvesOption,
    FollowOption,
    JsonOption,
    LowBandwidthOption,
    RunsDirOption,
    TrustOwnerOption,
    count_option,
    run_argument,
)
from tui.cli.run_options import find_any_runs, reads_run
from tui.cli.terminal import plain_commands, require_terminal

POLL_SECONDS = 0.3


@command(["gputrain attach", "gputrain attach fashion-17 --low-bandwidth", "gputrain attach digits-1 digits-2"])
def attach(
    *,
    runs: Annotated[list[str] | None, run_argument("[RUN]...", f"{OR_PATH} [default: last]", reads=True)] = None,
    low_bandwidth: LowBandwidthOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
) -> None:
    """Open the screen of a run, or the comparison of several.

    Quitting the screen does not stop the runs.
    """
    from engine.runs.comparison import require_comparable
    from tui.cli.open_tui import open_screen

    names = runs or [LAST_RUN]
    require_terminal(*plain_commands(names, runs_dir))
    found = find_any_runs(names, runs_dir, trust_owner=trust_owner)
    if len(found) == 1:
        if isinstance(found[0], RunFolder):
            open_screen(runs_dir, run=found[0], low_bandwidth=low_bandwidth)
        else:
            open_screen(runs_dir, watched=[expand_user(names[0])], low_bandwidth=low_bandwidth)
        return
    require_comparable(len(found))
    compared = [run.path if isinstance(run, RunFolder) else run for run in found]
    open_screen(runs_dir, first=lambda app: app.open_compare(compared), low_bandwidth=low_bandwidth)


@command(["gputrain logs last", "gputrain logs last -f", "gputrain logs fashion-17 -n 50"])
@reads_run
def logs(
    *,
    folder: RunFolder,
    follow: FollowOption = False,
    count: Annotated[int | None, count_option("last lines [default: all]")] = None,
) -> None:
    """Print the log of a run.

    The log holds the messages of the supervisor and the output of the ranks; of a job that has not begun its run, what
    the job printed. --follow also prints new lines. A terminal
    shows the colors of the output, unless NO_COLOR is set.
    """

    from engine.runs.batch.job import log_of
    from engine.runs.run_row import open_run

    path, colors = log_of(folder), sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    try:
        *full, log = open_log(path, colors=colors, count=count)
    except FileNotFoundError:
        typer.echo(f"{printable(folder.name)} has no log yet.", err=True)
        return
    except OSError as error:
        raise UsageError.one(str(path), f"cannot be read: {error.strerror}", code="not-readable") from error
    for reader in full:
        sys.stdout.writelines(reader.read())
    while True:
        live = follow and open_run(folder).live
        for text in log.read():
            sys.stdout.write(text)
        sys.stdout.flush()
        if not live or not is_read_for(POLL_SECONDS):
            return


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
        from engine.report.curve_points import read_points

        points = read_points(folder)
        if as_json:
            print_points_json(folder.name, points)
        else:
            print_points(points)
        return
    from engine.report.outcome import find_outcome
    from engine.runs.metric_directions import read_directions
    from engine.runs.run_row import open_run
    from tui.screens.tables import fact_lines
    from tui.screens.tables.config import change_lines
    from tui.screens.tables.run_facts import run_facts

    row, directions = open_run(folder), read_directions(folder.path.parent)
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
    print_lines(console, change_lines(row.record.config or {}, console.width))
