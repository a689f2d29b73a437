"""`gputrain runs`: the list of runs, filtered and sorted. `tui.cli.run_labels` has its subcommands."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.base.errors import UsageError, nearest
from engine.base.text import list_names, pluralize, printable
from engine.jobs.launch.survivors import find_survivors
from engine.runs.fields import names_of
from engine.runs.folder import RunFolder, RunState
from engine.runs.metric_directions import read_directions
from engine.runs.query import parse_columns, parse_query
from engine.runs.root import runs_root
from engine.runs.run_list import RunList
from engine.runs.run_row import RunRow
from engine.runs.run_view import RunView, SortOrder, ViewRequest, make_view
from tui.cli.command import command
from tui.cli.console import is_read_for, json_line, print_json, print_table, until_unread
from tui.cli.help import MinusWordsCommand
from tui.cli.options import HostsOption, JsonOption, RunsDirOption, count_option
from tui.cli.tree import subcommands

if TYPE_CHECKING:
    from tui.cli.hosts import HostRuns

# After this time, a terminal shows what takes long.
PATIENCE_SECONDS = 1.0
READ_SECONDS = 0.25
WATCH_SECONDS = 2.0
QUERY_HELP = "Condition: KEY=VALUE, also with != > < >= <= ~, or text in the name, state, tags or note."


@command(
    [
        "gputrain runs",
        "gputrain runs failed",
        "gputrain runs optim.name=adamw 'val_accuracy>0.9' -tag=old",
        "gputrain runs --sort accuracy -n 1 --json",
        "gputrain runs 'age<2d' --sort lr --columns name,model,lr,accuracy",
        "gputrain runs delete fashion-3 fashion-4",
    ],
    "KEY is a config key (optim.lr), a metric of the last epoch (val_accuracy) or of the run (best_val_accuracy, "
    "duration, age, started, images_per_second), one of your own metrics (f1, best_f1), a parameter of a command "
    "(hidden is that of --hidden 64) or a short name (model, dataset, lr, optimizer, batch, seed, tag). A KEY with "
    "blanks or operators is in double quotes: '\"val f1\">0.9'.",
    "VALUE may contain *; several values have commas between them. AGE is the time since the start. The trials of a "
    "sweep are one row with the metrics of its best trial; sweep=NAME, --quiet and --json list them one by one. To "
    "search for a word that is a command, write `gputrain runs list archive`. --hosts lists the newest "
    "200 runs of each host, as HOST:RUN: those of this runs folder if the host has it, else of its GPUTRAIN_RUNS or of "
    "~/runs there.",
    kind=MinusWordsCommand,
)
def list_runs(
    *,
    words: Annotated[list[str] | None, typer.Argument(metavar="[QUERY]...", help=QUERY_HELP)] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="KEY", help="Sort by KEY, the best or newest first.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="KEY,KEY", help="Show these keys, such as name,lr,accuracy.")
    ] = None,
    with_archived: Annotated[bool, typer.Option("--all", help="Also list archived runs.")] = False,
    count: Annotated[int | None, count_option("runs")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the names, one per line.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="With --json, print each change as a line until Ctrl-C.")
    ] = False,
    hosts: HostsOption = None,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first.

    Lists the runs that meet all conditions. A condition after a minus must not hold.
    """
    from tui.screens.tables.runs import field_columns, listed_columns

    root = runs_root(runs_dir)
    directions = read_directions(root)
    if quiet and (as_json or columns is not None):
        other = "--json" if as_json else "--columns"
        raise UsageError.one("--quiet", f"cannot be combined with {other}", code="conflict")
    if watch and (not as_json or columns is not None):
        raise UsageError.one("--watch", "needs --json, and takes no --columns", code="conflict")
    run_list: RunList | HostRuns
    if hosts is None:
        run_list = RunList(root)
        _read(run_list)
    else:
        from tui.cli.hosts import HostRuns

        run_list = HostRuns(hosts, root, follow=watch)
    # The metrics of the runs are keys, too.
    names = names_of(run_list.rows, directions)
    fields = None if columns is None else parse_columns(columns, names)
    # The list is sorted by start, newest first, as it is read.
    order = SortOrder.parse(sort or "started_at", names, reverse=reverse) if sort or reverse else None
    query = parse_query(words or [], names)

    def view_now() -> RunView:
        return make_view(ViewRequest(run_list.rows, order=order, archived=with_archived), query)

    if watch:
        watch_runs(run_list, lambda: view_now().matching[:count])
        return
    view = view_now()
    # Of a sweep, other programs get each trial.
    rows = (view.matching if as_json or quiet else view.shown)[:count]
    for row in rows:
        if row.unreadable:
            typer.echo(printable(f"{row.name}: {row.message}"), err=True)
    if quiet:
        sys.stdout.writelines(f"{printable(row.name)}\n" for row in rows)
    elif as_json:
        values = [row.to_json() for row in rows]
        for row, each in zip(rows, values, strict=True) if fields is not None else ():
            each["columns"] = {field.name: field.value(row) for field in fields or ()}
        print_json({"runs": values})
    elif rows:
        sorted_by = order.field if sort and order is not None else None
        print_table(listed_columns(rows, sorted_by) if fields is None else field_columns(fields, rows), rows)
    elif run_list.count == 0 and hosts is not None:
        typer.echo("There are no runs on these hosts.", err=True)
    elif run_list.count == 0:
        start = f"gputrain run --runs-dir {shlex.quote(str(root))}"
        typer.echo(f"There are no runs in {root}. Start one with `{start} CONFIG` or `{start} -- COMMAND`.", err=True)
    else:
        place = f"in {root}" if hosts is None else "on these hosts"
        typer.echo(f"None of the {pluralize(run_list.count, 'run')} {place} matches.", err=True)
    if hosts is None:
        _name_survivors(rows)
    if not rows and words and (name := nearest(words[0], subcommands("runs"))) is not None:
        typer.echo(f"`gputrain runs {name}` is a command.", err=True)
    if (sweep := next((row.name for row in rows if row.trials), "")) and not quiet:
        condition = printable(shlex.quote(f"sweep={sweep}"))
        typer.echo(f"A sweep is one row; `gputrain runs {condition}` lists its trials.", err=True)
    if view.hidden and not (as_json or quiet):
        verb = "is" if view.hidden == 1 else "are"
        typer.echo(f"{pluralize(view.hidden, 'archived run')} {verb} not listed; --all lists them too.", err=True)


def watch_runs(run_list: RunList | HostRuns, select: Callable[[], Sequence[RunRow]]) -> None:
    """Print each selected run that is new or has changed, and each that is gone, as a line of JSON, until nobody reads
    them."""

    def print_lines(lines: Iterable[Mapping[str, Any]]) -> None:
        sys.stdout.writelines(f"{json_line(line)}\n" for line in lines)
        sys.stdout.flush()

    with until_unread():
        shown = {row.name: row for row in select()}
        # Whoever follows the list knows by the last line that it is complete.
        print_lines([*(row.to_json() for row in shown.values()), {"listed": len(shown)}])
        while is_read_for(WATCH_SECONDS):
            run_list.poll(READ_SECONDS)
            rows = {row.name: row for row in select()}
            changed = [row.to_json() for name, row in rows.items() if shown.get(name) is not row]
            print_lines([*changed, *({"gone": name} for name in shown if name not in rows)])
            shown = rows


def _name_survivors(rows: Sequence[RunRow]) -> None:
    """Name what is left of commands whose supervisors were killed, or which could not be killed."""
    ended = (RunState.STOPPED, RunState.FAILED)
    states = {
        RunFolder(Path(row.folder)): row.state
        for row in rows
        if row.record.command
        and (row.state is RunState.CRASHED or (row.record.exit_code == -signal.SIGKILL and row.state in ended))
    }
    for folder, survivors in find_survivors(states).items() if states else ():
        pids, name = list_names([str(process.pid) for process in survivors]), printable(folder.name)
        stop = printable(f"gputrain stop {shlex.quote(folder.name)}")
        state = "has crashed" if states[folder] is RunState.CRASHED else f"is {states[folder]}"
        typer.echo(f"{name} {state}, and processes of it go on ({pids}): `{stop}`.", err=True)


def _read(run_list: RunList) -> None:
    """Read all runs, and say so on a terminal if that takes long."""
    start, is_told = time.monotonic(), not sys.stderr.isatty()
    while not run_list.complete:
        run_list.poll(READ_SECONDS)
        if not is_told and not run_list.complete and time.monotonic() - start > PATIENCE_SECONDS:
            typer.echo(f"Reading {run_list.count:,} runs …", err=True)
            is_told = True
