"""`gputrain runs tag`, `note`, `rename`, `archive`, `delete`, `restore` and `trash`: what a user does with runs.

`gputrain runs better` says which values of a metric are better in all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tui.cli.arguments import (
    RUN_HELP,
    JsonOption,
    RunArgument,
    RunsDirOption,
    TakeOverOption,
    exit_on_usage_error,
    print_warning,
    watch_other_hosts,
)
from tui.cli.help import HelpCommand, MinusWordsCommand, make_epilog
from tui.cli.run_list import app

if TYPE_CHECKING:
    from engine.runs.folder import RunFolder
    from engine.runs.labels import RunLabels

T = TypeVar("T")
R = TypeVar("R")
MAX_LISTED_RUNS = 20
RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN...", help=RUN_HELP)]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command(
    cls=MinusWordsCommand, epilog=make_epilog(["gputrain runs tag last +night -old", "gputrain runs tag last"])
)
def tag(
    words: Annotated[
        list[str], typer.Argument(metavar="RUN... [+TAG|-TAG]...", help=f"{RUN_HELP}\nTag to add or to remove.")
    ],
    runs_dir: RunsDirOption = None,
) -> None:
    """Add or remove tags of runs; without tags, print them."""
    from engine.runs.labels import read_labels
    from engine.utils.errors import UsageError

    names = [word for word in words if word[:1] not in "+!-"]
    added = [word[1:] for word in words if word[:1] == "+"]
    removed = [word[1:] for word in words if word[:1] in ("!", "-")]
    with exit_on_usage_error():
        if not names:
            raise UsageError.one("RUN", "is missing: gputrain runs tag RUN +TAG -TAG", code="missing-value")
        folders = _find_runs(names, runs_dir)
        if not added and not removed:
            for folder in folders:
                typer.echo(f"{folder.name}  {' '.join(read_labels(folder).tags)}".rstrip())
            return
        _label(folders, lambda labels: labels.with_tags(added, removed), _tags_text)


def _tags_text(labels: RunLabels) -> str:
    return f"tags {' '.join(labels.tags)}" if labels.tags else "no tags"


@app.command(cls=HelpCommand, epilog=make_epilog(["gputrain runs note last 'twice the batch, same lr'"]))
def note(
    run: RunArgument,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="The note; '' removes it. Without, prints it.")
    ] = None,
    runs_dir: RunsDirOption = None,
) -> None:
    """Set the note of a run, or print it."""
    from engine.runs.labels import read_labels
    from engine.utils.codec import replace
    from engine.utils.text import printable

    with exit_on_usage_error():
        folders = _find_runs([run], runs_dir)
        if text is None:
            typer.echo("\n".join(map(printable, read_labels(folders[0]).note.splitlines())))
            return
        words = " ".join(text).strip()
        _label(folders, lambda labels: replace(labels, note=words), lambda _: "note set" if words else "note removed")


@app.command(cls=HelpCommand, epilog=make_epilog(["gputrain runs rename fashion-17 fashion-best"]))
def rename(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
    runs_dir: RunsDirOption = None,
    take_over: TakeOverOption = False,
) -> None:
    """Rename a run that has ended."""
    from engine.runs.manage import rename_run

    with exit_on_usage_error():
        folder = _find_runs([run], runs_dir)[0]
        watch_other_hosts([folder], take_over=take_over)
        renamed = rename_run(folder, name, take_over=take_over)
    typer.echo(f"{_shown(folder.name)} is now {renamed.name}.", err=True)


@app.command(cls=HelpCommand, epilog=make_epilog(["gputrain runs archive fashion-3 fashion-4"]))
def archive(runs: RunsArgument, runs_dir: RunsDirOption = None) -> None:
    """Leave runs out of lists; their files stay."""
    from engine.utils.codec import replace

    with exit_on_usage_error():
        folders = _find_runs(runs, runs_dir)
        _label(folders, lambda labels: replace(labels, archived=True), lambda _: "archived")


@app.command(cls=HelpCommand, epilog=make_epilog(["gputrain runs unarchive fashion-3"]))
def unarchive(runs: RunsArgument, runs_dir: RunsDirOption = None) -> None:
    """List archived runs again."""
    from engine.utils.codec import replace

    with exit_on_usage_error():
        folders = _find_runs(runs, runs_dir)
        _label(folders, lambda labels: replace(labels, archived=False), lambda _: "no longer archived")


@app.command(cls=HelpCommand, epilog=make_epilog(["gputrain runs delete fashion-3", "gputrain runs delete last --yes"]))
def delete(
    runs: RunsArgument, runs_dir: RunsDirOption = None, yes: YesOption = False, take_over: TakeOverOption = False
) -> None:
    """Move runs that have ended to the trash."""
    from engine.runs.manage import find_own_run
    from engine.runs.trash import check_deletable, move_to_trash, run_contents
    from engine.utils.text import pluralize

    def move(folder: RunFolder) -> None:
        run = move_to_trash(folder, take_over=take_over)
        typer.echo(f"{_shown(run.name)} is in the trash; `gputrain runs restore {run.entry}` restores it.", err=True)

    with exit_on_usage_error():
        root = _root(runs_dir)
        folders = list({str(run.path): run for run in (find_own_run(root, name) for name in runs)}.values())
        watch_other_hosts(folders, take_over=take_over)
        _for_each(folders, lambda folder: check_deletable(folder, take_over=take_over))
        _ask(
            f"Move {pluralize(len(folders), 'run')} to the trash",
            [f"{_shown(folder.name)}: {run_contents(folder.path)}" for folder in folders],
            "delete",
            yes=yes,
        )
        _for_each(folders, move)


@app.command(cls=HelpCommand, epilog=make_epilog(["gputrain runs restore fashion-3"]))
def restore(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run in the trash.")],
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Restore it under this name.")] = None,
    runs_dir: RunsDirOption = None,
) -> None:
    """Move a run from the trash back."""
    from engine.runs.trash import find_in_trash, restore_run

    with exit_on_usage_error():
        root = _root(runs_dir)
        folder = restore_run(root, find_in_trash(root, run), name)
    typer.echo(f"{folder.name} is restored.", err=True)


@app.command(cls=HelpCommand, epilog=make_epilog(["gputrain runs trash", "gputrain runs trash --empty --yes"]))
def trash(
    empty: Annotated[bool, typer.Option("--empty", help="Delete the runs in the trash for good.")] = False,
    runs_dir: RunsDirOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the trash, or empty it."""
    import time

    from engine.runs.folder import RunFolder
    from engine.runs.trash import TrashedRun, delete_for_good, list_trash, run_contents
    from engine.show.table import Column
    from engine.utils.text import pluralize
    from engine.utils.units import format_age
    from tui.cli.console import print_table

    with exit_on_usage_error():
        root = _root(runs_dir)
        runs = list_trash(root)
        contents = {run.entry: run_contents(run.path) for run in runs}
        if not runs:
            typer.echo(f"The trash of {root} is empty.", err=True)
        elif empty:
            questions = [f"{_shown(run.entry)}: {contents[run.entry]}" for run in runs]
            _ask(f"Delete {pluralize(len(runs), 'run')} for good", questions, "trash --empty", yes=yes)
            watch_other_hosts([RunFolder(run.path) for run in runs], take_over=True)
            _for_each(runs, delete_for_good)
            typer.echo(f"Deleted {pluralize(len(runs), 'run')}.", err=True)
            return
    if as_json:
        values = [
            {"name": run.name, "entry": run.entry, "folder": str(run.path), "deleted_at": run.deleted_at}
            | {"files": contents[run.entry].files, "size_bytes": contents[run.entry].size_bytes}
            | {"checkpoints": contents[run.entry].checkpoints}
            for run in runs
        ]
        typer.echo(json.dumps({"format": 1, "runs": values}, indent=2))
    elif runs:
        columns: list[Column[TrashedRun]] = [
            Column("name", "name", lambda run: run.entry),
            Column("contents", "contents", lambda run: str(contents[run.entry])),
            Column("deleted", "deleted", lambda run: f"{format_age(max(time.time() - run.deleted_at, 0))} ago"),
        ]
        print_table(columns, runs)


@app.command(
    cls=HelpCommand, epilog=make_epilog(["gputrain runs better val/gap low", "gputrain runs better val/gap auto"])
)
def better(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of one of your own metrics.")],
    direction: Annotated[
        str, typer.Argument(metavar="low|high|auto", help="The values that are better; auto follows the name.")
    ],
    runs_dir: RunsDirOption = None,
) -> None:
    """Say which values of one of your own metrics are better."""
    from engine.runs.keys import parse_metric_name
    from engine.runs.metric_directions import DIRECTIONS, store_direction
    from engine.runs.metrics import better_of_name, own_metrics
    from engine.runs.run_list import RunList
    from engine.utils.errors import Problem, UsageError, nearest

    name = parse_metric_name(name)
    with exit_on_usage_error():
        if direction not in (*DIRECTIONS, "auto"):
            raise UsageError.one(direction, "is not low, high or auto", code="invalid-value")
        run_list = RunList(_root(runs_dir))
        store_direction(run_list.root, name, DIRECTIONS.get(direction))
        run_list.poll()
    known = own_metrics(row.record for row in run_list.rows)
    if name not in known:
        found = nearest(name, known)
        advice = "" if found is None else f"did you mean {found}?"
        print_warning(Problem(name, f"is no metric of the runs in {run_list.root}", advice, code="unknown-key"))
    typer.echo(f"{_shown(name)}: {DIRECTIONS.get(direction) or better_of_name(name)} is better", err=True)


def _root(runs_dir: str | None) -> Path:
    from engine.runs.folder import runs_root

    return runs_root(runs_dir)


def _shown(name: str) -> str:
    from engine.utils.text import printable

    return printable(name)


def _find_runs(names: Iterable[str], runs_dir: str | None) -> list[RunFolder]:
    """Return runs by name, each once. Raises UsageError with a problem for each that does not exist."""
    from engine.runs.manage import find_own_run

    root = _root(runs_dir)
    found = _for_each(list(names), lambda name: find_own_run(root, name))
    return list({str(run.path): run for run in found}.values())


def _for_each(items: Sequence[T], act: Callable[[T], R]) -> list[R]:
    """Do something with each item, and return the results. Raises UsageError with all problems at the end."""
    from engine.utils.errors import Problem, UsageError, collect_problems

    problems, results = list[Problem](), list[R]()
    for item in items:
        with collect_problems(problems):
            results.append(act(item))
    if problems:
        raise UsageError(problems)
    return results


def _label(
    folders: Sequence[RunFolder], change: Callable[[RunLabels], RunLabels], describe: Callable[[RunLabels], str]
) -> None:
    """Change the labels of runs, and print what they are now. Raises UsageError with all problems."""
    from engine.runs.labels import change_labels

    def act(folder: RunFolder) -> None:
        labels = change_labels(folder, change)
        typer.echo(f"{_shown(folder.name)}: {describe(labels)}".rstrip(), err=True)

    _for_each(folders, act)


def is_interactive() -> bool:
    """Whether somebody can answer a question."""
    return sys.stdin.isatty()


def _ask(question: str, lines: Sequence[str], command: str, *, yes: bool) -> None:
    """Ask on the terminal whether to go on; leave with exit code 1 if not. Raises UsageError without a terminal."""
    from engine.utils.errors import UsageError

    if yes:
        return
    if not is_interactive():
        raise UsageError.one(
            f"gputrain runs {command}",
            "asks a question, and there is no terminal; add --yes",
            code="no-terminal",
        )
    shown = (
        lines
        if len(lines) <= MAX_LISTED_RUNS
        else [*lines[:MAX_LISTED_RUNS], f"and {len(lines) - MAX_LISTED_RUNS} more"]
    )
    for line in shown:
        typer.echo(f"  {line}", err=True)
    if not typer.confirm(f"{question}?", err=True):
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)
