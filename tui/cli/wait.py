"""`gputrain wait`: wait until runs have ended or meet a condition, for scripts and agents."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import typer

from engine.base.errors import Problem
from engine.base.exit_codes import ExitCode
from engine.base.text import printable
from engine.report.awaited_run import AwaitedRun, Result, RunWait, parse_condition
from engine.report.table import shorten
from engine.runs.folder import RunFolder
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import Better
from engine.runs.query import Query, parse_duration
from tui.cli.command import command
from tui.cli.console import is_read_for, print_json, print_warning, show_progress
from tui.cli.options import JsonOption
from tui.cli.run_options import reads_runs, watch_other_hosts

POLL_SECONDS = 1.0
WAIT_CODES: dict[int, str] = {
    ExitCode.FINISHED: "all runs finished, or meet --until",
    ExitCode.FAILED: "a run failed, crashed, was deleted, or finished without meeting --until",
    ExitCode.STOPPED: "a run was stopped, and none failed",
    ExitCode.TIMED_OUT: "the time of --timeout is up; the runs go on",
}


@command(
    [
        "gputrain wait last",
        "gputrain wait flowers-3 flowers-4 --timeout 8h --json",
        "gputrain wait flowers-3 --until 'val_accuracy>0.9'",
        "gputrain wait gpt-2 --until 'val/acc>90% step>=1000' --json",
    ],
    exit_codes=WAIT_CODES,
)
@reads_runs
def wait(
    *,
    folders: list[RunFolder],
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="QUERY", help="Also return once each run meets QUERY, as in gputrain runs."),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="Stop waiting after this time, such as 30min.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until runs have ended.

    Prints one line for each run as soon as it is done, or with --json one object at the end: how each run ended, its
    newest figures, and of one that failed the cause, its last lines and the next command.

    A run that waits in the queue, is paused, restarts its ranks or is resumed goes on. A run that is stopped, fails,
    crashes or is deleted has ended; a later `gputrain resume` needs another wait. With --until, a run is also done once
    its newest values meet the condition: best_val_accuracy is the best one so far. A metric may appear later.
    """
    timeout_s = math.inf if timeout is None else parse_duration("--timeout", timeout)
    deadline = time.monotonic() + timeout_s
    directions: Mapping[str, Better] = {}
    for root in {folder.path.parent for folder in folders}:
        directions = {**directions, **read_directions(root)}
    watch_other_hosts(folders)
    waits = [RunWait(folder) for folder in folders]
    condition = None
    if until is not None:
        condition, notes = parse_condition(until, [each.row for each in waits], directions)
        for note in notes:
            print_warning(Problem("--until", note, code="unknown-key"))
    found: dict[RunWait, AwaitedRun] = {}
    for each in follow(waits, condition, deadline):
        found[each] = each.describe(condition, directions)
        if not as_json:
            typer.echo(printable(line_of(found[each])))
    code = exit_code([*found.values()])
    if as_json:
        print_json({"exit_code": code, "runs": [found[each] for each in waits]})
    raise typer.Exit(code)


def follow(waits: Sequence[RunWait], condition: Query | None, deadline: float) -> Iterator[RunWait]:
    """Yield each run as soon as it is done, and at the deadline the others. Shows them on a terminal meanwhile."""
    left, held = [*waits], set[str]()
    try:
        while True:
            for each in left.copy():
                each.poll(condition)
                if each.result is not None:
                    left.remove(each)
                    show_progress("")
                    yield each
            for each in left:
                if each.is_held and each.row.name not in held:
                    held.add(each.row.name)
                    typer.echo(f"{each.row.name} waits: {printable(each.row.message)}", err=True)
            remaining_s = deadline - time.monotonic()
            if not left or remaining_s <= 0:
                break
            if sys.stderr.isatty():
                show_progress(waiting_line(left, len(waits)))
            if not is_read_for(min(POLL_SECONDS, remaining_s)):
                # As of a command that another host has sent, whose connection has ended.
                break
    finally:
        show_progress("")
    yield from left


def waiting_line(left: Sequence[RunWait], count: int) -> str:
    """Return how far the first of the runs is, as wide as the terminal."""
    from tui.screens.phrases import epochs_text, when_text

    row = left[0].row
    ended = f"{count - len(left)} of {count} runs are done; " if count > 1 else ""
    parts = [row.state, *([row.message] if row.message else [epochs_text(row), when_text(row)])]
    text = f"{ended}{row.name} is {', '.join(filter(None, parts))}"
    return shorten(printable(text), shutil.get_terminal_size().columns - 1)


def line_of(run: AwaitedRun) -> str:
    """Return what became of a run in one line."""
    message = run.failure.cause if run.failure is not None else run.message
    if run.result == Result.TIMEOUT:
        message = f"it is still {run.state}{f', {message}' if message else ''}"
    return f"{run.name} {run.result}{f': {message}' if message else ''}"


def exit_code(runs: Sequence[AwaitedRun]) -> int:
    """Return the exit code for these runs."""
    results = {run.result for run in runs}
    if Result.TIMEOUT in results:
        return ExitCode.TIMED_OUT
    if results <= {Result.FINISHED, Result.MET}:
        return ExitCode.FINISHED
    return ExitCode.STOPPED if results <= {Result.FINISHED, Result.MET, Result.STOPPED} else ExitCode.FAILED
