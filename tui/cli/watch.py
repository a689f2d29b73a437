"""`gputrain watch`: the runs that other programs record below a path, and the process that writes them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.base.codec import finite
from engine.base.errors import Problem, UsageError
from engine.base.exit_codes import ExitCode
from engine.base.files import expand_user, is_file, is_folder
from engine.base.text import printable
from engine.gpus.monitor import open_monitor
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.runs.foreign_record import metric_keys
from engine.runs.root import is_run_folder
from engine.watch.folders import ForeignRun, SearchLimits, find_runs
from engine.watch.process import ProcessId, ProcessTree, find_process_runs, read_tree, started_at
from engine.watch.reading import ColumnChoice
from tui.cli.command import command
from tui.cli.completions import complete_paths
from tui.cli.console import (
    print_error,
    print_json,
    print_points,
    print_points_json,
    print_table,
    print_warning,
    reading_line,
)
from tui.cli.options import CurvesOption, JsonOption, LowBandwidthOption, count_option
from tui.cli.terminal import is_on_terminal, require_terminal
from tui.cli.train import should_open_screen

if TYPE_CHECKING:
    from engine.runs.curves import CurveReader

MAX_PID_DIGITS = 10
PROCESS_COLUMNS = 200
GPU_TIMEOUT_SECONDS = 5.0


@command(
    ["gputrain watch lightning_logs", "gputrain watch runs/ wandb/", "gputrain watch 12345", "gputrain watch . --json"],
    exit_codes={1: "a path cannot be read", 2: "there is no such path or process"},
)
def watch(
    *,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...|PID",
            help="Folder of runs, folder of a run, a log, or the ID of a process.",
            autocompletion=complete_paths,
        ),
    ],
    count: Annotated[int | None, count_option("runs")] = None,
    x: Annotated[
        str | None, typer.Option("--x", metavar="NAME", help="Column of CSV and JSON files that is x.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="PATTERN", help="Columns that are metrics, such as '*_loss'.")
    ] = None,
    low_bandwidth: LowBandwidthOption = False,
    curves: CurvesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Watch what other programs log below a path, or one process.

    On a terminal, opens the screen. Without one, with --json and with -n, prints the runs, the newest first.

    A run is growing if one of its files was written in the last 3 minutes, and ended if its log says so, or if the
    process that is watched has ended. Any other run is quiet.

    Reads TensorBoard event files, CSV, JSON and JSON lines, Hugging Face's trainer_state.json, W&B's .wandb files,
    MLflow's database and file store, trackio's databases, and the lines printed into a text file beside none of these.
    Writes nothing there, runs nothing, and follows no link inside.

    A number that is no path is a process: the screen shows its children, its GPUs, its log, and the runs that it
    writes. It gets no signal.

    --json prints each run with its state and its parameters. Each metric has its name in the run, its key in
    comparisons, the number of its values, the last step and the last value. Of a PID, it also prints the processes,
    their GPUs and files.

    --curves prints each point of one run: metric, step, epoch, time and value.

    Files that look like metrics, but are not read, are named. Of CSV and JSON files, --x names the column of the x
    axis, and --metrics those of the metrics. An x with fractions is the axis `epoch`.

    A run of gputrain opens in its own screen. In a list, runs of gputrain are left out: gputrain runs shows them.
    """
    choice = ColumnChoice(x or "", metrics or "")
    is_plain = as_json or curves or count is not None
    if not is_plain and is_on_terminal():
        require_terminal(f"gputrain watch {shlex.join(paths)} -n 20")
    opens_screen = should_open_screen(headless=is_plain)
    if any(_is_pid(path) for path in paths):
        if len(paths) > 1:
            raise UsageError.one(" ".join(paths), "is a process and something else; name a PID alone", code="too-many")
        if curves:
            raise UsageError.one(
                "--curves", "has no effect on a process", "name the folder of one run", code="conflict"
            )
        watch_process(paths[0], as_json=as_json, opens_screen=opens_screen, low_bandwidth=low_bandwidth)
        return
    for path in paths:
        if not _is_path(path):
            raise UsageError.one(
                path, "is neither a folder nor a file", "name a folder of runs, or a PID", code="not-found"
            )
        if not os.access(expand_user(path), os.R_OK):
            print_error(Problem(path, "cannot be read: permission denied", code="not-readable"))
            raise typer.Exit(ExitCode.FAILED)
    if opens_screen:
        from tui.cli.open_tui import open_screen

        only = expand_user(paths[0]).resolve()
        if len(paths) == 1 and is_run_folder(only):
            open_screen(run=str(only), low_bandwidth=low_bandwidth)
        watched = [expand_user(path) for path in paths]
        open_screen(watched=watched, column_choice=choice, low_bandwidth=low_bandwidth)
        return
    if curves:
        print_curves(paths, choice, as_json=as_json)
    else:
        print_runs(paths, count, choice, as_json=as_json)


def print_curves(paths: Sequence[str], choice: ColumnChoice, *, as_json: bool) -> None:
    """Print each point of the only run below paths. Raises UsageError if there are several."""
    from engine.report.curve_points import read_points

    found = [find_runs(expand_user(path), SearchLimits(choice=choice)) for path in paths]
    runs = [run for each in found for run in each.runs]
    own = [folder for each in found for folder in each.own]
    if own and not runs:
        advice = f"`gputrain runs show {shlex.quote(str(own[0]))} --curves` prints them"
        raise UsageError.one(" ".join(paths), "is of gputrain", advice, code="conflict")
    if len(runs) != 1:
        advice = "name the folder of one run, as in the list of `gputrain watch -n 20`"
        raise UsageError.one(
            " ".join(paths), f"has {len(runs)} runs; --curves prints one", advice, code="ambiguous-name"
        )
    points = read_points(runs[0])
    if as_json:
        print_points_json(runs[0].name, points)
    else:
        print_points(points)


def _is_pid(text: str) -> bool:
    """Whether an argument is the ID of a process: a number that is no path."""
    return text.isascii() and text.isdecimal() and not _is_path(text)


def _is_path(text: str) -> bool:
    """Whether an argument is a folder or a file; False also if it is inaccessible or too long."""
    path = expand_user(text)
    return is_folder(path) or is_file(path)


def print_runs(paths: Sequence[str], count: int | None, choice: ColumnChoice, *, as_json: bool) -> None:
    """Print the runs below paths."""
    from engine.report.foreign_run import describe, read_whole
    from tui.screens.phrases import own_runs_problem
    from tui.screens.tables.foreign_runs import foreign_columns

    found: list[ForeignRun] = []
    own, unread = set[Path](), list[str]()
    for path in paths:
        below = find_runs(expand_user(path), SearchLimits(names_unread=True, choice=choice))
        unread += below.unread
        for text in below.unread:
            print_warning(Problem(path, text, code="not-readable"))
        found += below.runs
        own |= below.own
        if below.is_partial:
            print_warning(Problem(path, "has too many files or folders; not all are listed", code="too-many"))
    if own:
        print_warning(own_runs_problem(own, "gputrain runs"))
    # A run may be below two of the paths.
    runs = list({run.key: run for run in reversed(found)}.values())
    runs.sort(key=lambda run: -run.changed_at())
    with reading_line(runs[:count]) as on_read:
        readers = [read_whole(run, on_read) for run in runs[:count]]
    # The rows of a database tell when each of its runs changed.
    readers.sort(key=lambda reader: -reader.run.changed_at())
    for reader in readers:
        for problem in reader.problems:
            print_warning(Problem(reader.run.name, problem, code="damaged"))
    if as_json:
        print_json({"runs": list(map(run_json, readers)), "skipped": unread})
    elif readers:
        print_table(foreign_columns(), list(map(describe, readers)))
    if not readers and not own:
        advice = "Formats that are read: gputrain watch --help."
        if (printed := next((path for path in paths if is_file(expand_user(path))), None)) is not None:
            parse = f"gputrain run --try-parse {printable(shlex.quote(printed))}"
            advice = f"{advice} What is found in printed lines: {parse}"
        typer.echo(f"No run in {printable(', '.join(paths))}. {advice}", err=True)


def run_json(reader: CurveReader) -> dict[str, Any]:
    """Return a run as `gputrain watch --json` prints it."""
    from engine.report.foreign_run import find_state

    run, values = reader.run, reader.curves.values(sorted(reader.curves.names))
    keys = metric_keys(values)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "formats": list(run.formats),
        "state": str(find_state(reader)),
        "changed_at": run.changed_at(),
        "parameters": {
            key: finite(value) if isinstance(value, float) else value for key, value in reader.parameters().items()
        },
        "metrics": [
            {
                "name": name,
                "key": keys.get(name),
                "count": metric.count,
                "last_step": metric.step,
                "last_value": metric.last,
            }
            for name, metric in values.items()
        ],
        "restarts": reader.curves.restarts,
        "problems": list(reader.problems),
    }


def watch_process(text: str, *, as_json: bool, opens_screen: bool, low_bandwidth: bool) -> None:
    """Open the screen of a process, or print it. Raises UsageError if there is none."""
    # A number of 4300 digits is no integer for Python.
    process = ProcessId.find(int(text)) if len(text) < MAX_PID_DIGITS else None
    tree = None if process is None else read_tree(process)
    if process is None or tree is None or not tree.processes:
        raise UsageError.one(text, "is neither a path nor a running process", code="not-found")
    if opens_screen:
        from tui.cli.open_tui import open_screen
        from tui.screens.process import ProcessScreen

        if tree.own_run is not None:
            open_screen(run=str(tree.own_run), low_bandwidth=low_bandwidth)
        open_screen(first=lambda app: app.open_watched(ProcessScreen(app, process)), low_bandwidth=low_bandwidth)
    print_process(process, tree, as_json=as_json)


def print_process(process: ProcessId, tree: ProcessTree, *, as_json: bool) -> None:
    """Print a process, its GPUs, and the runs that it writes."""
    from engine.report.foreign_run import describe, read_whole
    from tui.screens.pollers.process import gpu_uses
    from tui.screens.tables.foreign_runs import foreign_columns
    from tui.screens.tables.process import gpu_lines, hidden_text, tree_lines

    uses = gpu_uses(_read_gpus(), {part.id.pid for part in tree.processes})
    runs = () if tree.own_run is not None else find_process_runs(tree, started_at(process)).runs
    with reading_line(runs) as on_read:
        readers = [read_whole(run, on_read) for run in runs]
    if as_json:
        shown = {
            "pid": process.pid,
            "started_at": started_at(process),
            "own_run": None if tree.own_run is None else str(tree.own_run),
            "is_partly_hidden": tree.is_hidden,
            "processes": [
                {
                    "pid": part.id.pid, "parent": part.parent, "user": part.user, "command": part.command,
                    "cpu_seconds": part.cpu_seconds, "memory_bytes": part.memory_bytes,
                }
                for part in tree.processes
            ],
            "gpus": [
                {"index": gpu.index, "uuid": gpu.uuid, "pid": use.pid, "memory_bytes": use.gpu_memory.value}
                for gpu, use in uses
            ],
            "open_files": list(map(str, tree.files)),
            "logs": list(map(str, tree.logs)),
        }  # fmt: skip
        print_json({"runs": list(map(run_json, readers)), "process": shown})
        return
    hidden = hidden_text(tree)
    for line in (*tree_lines(tree, {}, uses, PROCESS_COLUMNS), *gpu_lines(uses), *([hidden] if hidden else [])):
        typer.echo(line.plain.rstrip())
    if tree.own_run is not None:
        typer.echo(f"It belongs to a run of gputrain: gputrain attach {shlex.quote(str(tree.own_run))}", err=True)
    elif readers:
        typer.echo()
        print_table(foreign_columns(), list(map(describe, readers)))
    else:
        typer.echo("It writes no run that is found.", err=True)


def _read_gpus() -> Snapshot | None:
    """Return a snapshot of the GPUs, None without an answer."""
    try:
        monitor = open_monitor(SamplerOptions())
    except UsageError:
        return None
    try:
        return monitor.read(GPU_TIMEOUT_SECONDS)
    finally:
        monitor.close()
