"""`gputrain queue`: list the runs that wait for GPUs, and change the place of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.base.errors import UsageError
from engine.base.text import printable
from engine.jobs.queue import listing
from engine.jobs.queue.listing import interrupted_rows
from engine.runs.folder import RunFolder
from engine.runs.root import runs_root
from tui.cli.command import command
from tui.cli.completions import complete_runs
from tui.cli.console import print_json, print_table
from tui.cli.options import JsonOption, RunsDirOption, TrustCodeOption, TrustOwnerOption, run_argument
from tui.cli.run_options import announce_watch


@command(
    [
        "gputrain queue",
        "gputrain run flowers.yaml --gpus free:2 --queue --detach    join the queue",
        "gputrain stop flowers-3                                     leave the queue",
        "gputrain queue hold flowers-3",
        "gputrain queue move flowers-4 --first",
        "gputrain queue resume                                       after a reboot",
    ],
    "Between users, the order of arrival counts. A run arrives when it waits for GPUs only: not while it is held "
    "or waits for another run or a time. priority and move order your own runs.",
    "gputrain config describe queue lists the keys of `gputrain run` for the queue: queue.after is --after.",
)
def list_queue(*, runs_dir: RunsDirOption = None, as_json: JsonOption = False) -> None:
    """List the waiting runs of all users.

    hold, release, move, priority and begin change one of your own waiting runs.
    """
    from tui.screens.tables.queue import PLAIN_COLUMNS

    rows = listing.list_queue(runs_root(runs_dir))
    if as_json:
        print_json({"queue": [row.to_dict() for row in rows]})
    elif not rows:
        typer.echo("No run waits on this host.", err=True)
    else:
        print_table(PLAIN_COLUMNS, rows)


@command(["gputrain queue hold flowers-3"])
def hold(*, run: Annotated[str, run_argument()], runs_dir: RunsDirOption = None) -> None:
    """Keep a waiting run from starting until it is released."""
    from engine.jobs.queue import edit

    typer.echo(edit.hold(edit.find_own_row(run, runs_root(runs_dir))), err=True)


@command(["gputrain queue release flowers-3"])
def release(*, run: Annotated[str, run_argument()], runs_dir: RunsDirOption = None) -> None:
    """Let a held run start again.

    It joins the queue again: runs of other users that have arrived meanwhile come first. A run that is held because a
    run before it was stopped starts without it.
    """
    from engine.jobs.queue import edit

    typer.echo(edit.release(edit.find_own_row(run, runs_root(runs_dir))), err=True)


@command(["gputrain queue move b --before a", "gputrain queue move b --first"])
def move(
    *,
    run: Annotated[str, run_argument()],
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="RUN", help="Start it before this run.", autocompletion=complete_runs),
    ] = None,
    first: Annotated[bool, typer.Option("--first", help="Start it before all your other runs.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Start it after all your other runs.")] = False,
    runs_dir: RunsDirOption = None,
) -> None:
    """Change the order of your own waiting runs.

    The run takes the priority of its new neighbor.
    """
    from engine.jobs.queue import edit, listing

    if (before is not None) + first + last != 1:
        raise UsageError.one("move", "needs one of --before RUN, --first and --last", code="missing-value")
    root = runs_root(runs_dir)
    rows = listing.list_queue(root)
    row = edit.find_own_row(run, root, rows)
    if before is not None:
        typer.echo(edit.move(row, rows, edit.find_own_row(before, root, rows)), err=True)
    else:
        typer.echo(edit.move(row, rows, "first" if first else "last"), err=True)


@command(["gputrain queue priority flowers-3 10"])
def priority(
    *,
    run: Annotated[str, run_argument()],
    value: Annotated[int, typer.Argument(metavar="N", help="Highest first; negative with -- before it.")],
    runs_dir: RunsDirOption = None,
) -> None:
    """Set the priority of a run among your own waiting runs."""
    from engine.jobs.queue import edit

    typer.echo(edit.set_priority(edit.find_own_row(run, runs_root(runs_dir)), value), err=True)


@command(["gputrain queue begin flowers-3 now+2h", "gputrain queue begin flowers-3 now"])
def begin(
    *,
    run: Annotated[str, run_argument()],
    when: Annotated[str, typer.Argument(metavar="TIME", help="22:00, now+2h or 2026-12-01T08:00; now ends the wait.")],
    runs_dir: RunsDirOption = None,
) -> None:
    """Change the time before which a waiting run does not start."""
    from engine.jobs.queue import edit

    row = edit.find_own_row(run, runs_root(runs_dir))
    typer.echo(edit.set_begin(row, edit.parse_begin(when)), err=True)


@command(["gputrain queue resume", "gputrain queue resume flowers-3 flowers-4"])
def resume(
    *,
    runs: Annotated[list[str] | None, run_argument("[RUN]...", " [default: all that were interrupted]")] = None,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Start the runs again that a reboot interrupted.

    These are all runs whose supervisor was killed while it waited. They start in their old order, and join the queue
    behind the runs of other users that have arrived since.
    """
    from engine.jobs.launch.detached import resume_waits
    from tui.screens.launcher import launch_run

    root = runs_root(runs_dir)
    rows = interrupted_rows(root)
    for name in runs or []:
        if name not in (row.name for row in rows):
            raise UsageError.one(
                name, "is no run whose wait was interrupted; `gputrain queue` lists them", code="wrong-state"
            )
    chosen = [row for row in rows if not runs or row.name in runs]
    if not chosen:
        typer.echo(f"No run in {root} was interrupted while it waited.", err=True)
    announce_watch([RunFolder(Path(row.folder)) for row in chosen])
    flags = ["--trust-owner"] * trust_owner + ["--trust-code"] * trust_code
    failed = False
    for result in resume_waits(chosen, launch_run, flags):
        if result.accepted:
            typer.echo(result.row.name)
            continue
        failed = True
        for line in result.output or ("it did not start",):
            typer.echo(f"{result.row.name}: {printable(line)}", err=True)
    if failed:
        raise typer.Exit(1)
