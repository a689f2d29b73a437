"""`gputrain runs tag`, `note`, `rename`, `archive`, `delete`, `restore` and `trash`: what a user does with runs.

`gputrain runs better` says which values of a metric are better in all of them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import typer

from engine.base.codec import replace
from engine.base.errors import Problem, UsageError, nearest
from engine.base.text import pluralize, printable
from engine.base.units import format_age, format_bytes, format_count
from engine.report.table import Align, Column
from engine.runs.folder import RunFolder
from engine.runs.keys import parse_metric_name
from engine.runs.labels import RunLabels, change_labels, read_labels
from engine.runs.manage import (
    RunContents,
    TrashedRun,
    delete_for_good,
    find_in_trash,
    list_trash,
    move_to_trash,
    rename_run,
    restore_run,
    run_contents,
)
from engine.runs.metric_directions import DIRECTIONS, store_direction
from engine.runs.metrics import better_of_name, own_metrics
from engine.runs.root import runs_root
from engine.runs.run_list import RunList
from tui.cli.command import command
from tui.cli.completions import complete_runs
from tui.cli.console import ask, print_json, print_table, print_warning
from tui.cli.help import MinusWordsCommand
from tui.cli.options import RUN_HELP, JsonOption, RunsDirOption, YesOption, run_argument
from tui.cli.run_options import find_own_runs, for_each, takes_own_runs, watch_other_hosts


@command(["gputrain runs tag last +night -old", "gputrain runs tag last"], kind=MinusWordsCommand)
def tag(
    *,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [+TAG|-TAG]...",
            help=f"{RUN_HELP}\nTag to add or to remove.",
            autocompletion=complete_runs,
        ),
    ],
    runs_dir: RunsDirOption = None,
) -> None:
    """Add or remove tags of runs; without tags, print them."""
    names = [word for word in words if word[:1] not in "+!-"]
    added = [word[1:] for word in words if word[:1] == "+"]
    removed = [word[1:] for word in words if word[:1] in ("!", "-")]
    if not names:
        raise UsageError.one("RUN", "is missing: gputrain runs tag RUN +TAG -TAG", code="missing-value")
    folders = find_own_runs(names, runs_dir)
    if not added and not removed:
        for folder in folders:
            typer.echo(f"{folder.name}  {' '.join(read_labels(folder).tags)}".rstrip())
        return
    _label(folders, lambda labels: labels.with_tags(added, removed), _tags_text)


def _tags_text(labels: RunLabels) -> str:
    return f"tags {' '.join(labels.tags)}" if labels.tags else "no tags"


@command(["gputrain runs note last 'twice the batch, same lr'"])
def note(
    *,
    run: Annotated[str, run_argument()],
    text: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="The note; '' removes it. Without, prints it.")
    ] = None,
    runs_dir: RunsDirOption = None,
) -> None:
    """Set the note of a run, or print it."""
    folders = find_own_runs([run], runs_dir)
    if text is None:
        typer.echo("\n".join(map(printable, read_labels(folders[0]).note.splitlines())))
        return
    words = " ".join(text).strip()
    _label(folders, lambda labels: replace(labels, note=words), lambda _: "note set" if words else "note removed")


@command(["gputrain runs rename fashion-17 fashion-best"])
def rename(
    *,
    run: Annotated[str, run_argument()],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
    runs_dir: RunsDirOption = None,
) -> None:
    """Rename a run that has ended."""
    folder = find_own_runs([run], runs_dir)[0]
    watch_other_hosts([folder])
    renamed = rename_run(folder, name)
    typer.echo(f"{printable(folder.name)} is now {renamed.name}.", err=True)


@command(["gputrain runs archive fashion-3 fashion-4"])
@takes_own_runs
def archive(*, folders: list[RunFolder]) -> None:
    """Leave runs out of lists; their files stay."""
    _label(folders, lambda labels: replace(labels, archived=True), lambda _: "archived")


@command(["gputrain runs unarchive fashion-3"])
@takes_own_runs
def unarchive(*, folders: list[RunFolder]) -> None:
    """List archived runs again."""
    _label(folders, lambda labels: replace(labels, archived=False), lambda _: "no longer archived")


@command(["gputrain runs delete fashion-3", "gputrain runs delete last --yes"])
@takes_own_runs
def delete(*, folders: list[RunFolder], yes: YesOption = False) -> None:
    """Move runs that have ended to the trash."""

    def move(folder: RunFolder) -> None:
        run = move_to_trash(folder)
        restore = f"`gputrain runs restore {shlex.quote(printable(run.entry))}` restores it"
        typer.echo(f"{printable(run.name)} is in the trash; {restore}.", err=True)

    watch_other_hosts(folders)
    ask(
        f"Move {pluralize(len(folders), 'run')} to the trash",
        [f"{printable(folder.name)}: {run_contents(folder.path)}" for folder in folders],
        "gputrain runs delete",
        yes=yes,
    )
    for_each(folders, move)


@command(["gputrain runs restore fashion-3"])
def restore(
    *,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run in the trash.")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The new name [default: the old one]")] = None,
    runs_dir: RunsDirOption = None,
) -> None:
    """Move a run from the trash back."""
    root = runs_root(runs_dir)
    folder = restore_run(root, find_in_trash(root, run), name)
    typer.echo(f"{printable(folder.name)} is restored.", err=True)


@command(["gputrain runs trash", "gputrain runs trash --empty --yes"])
def trash(
    *,
    empty: Annotated[bool, typer.Option("--empty", help="Delete the runs in the trash for good.")] = False,
    runs_dir: RunsDirOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the trash, or empty it."""
    root = runs_root(runs_dir)
    runs = list_trash(root)
    contents = {run.entry: run_contents(run.path) for run in runs}
    if not runs:
        typer.echo(f"The trash of {root} is empty.", err=True)
    elif empty:
        questions = [f"{printable(run.entry)}: {contents[run.entry]}" for run in runs]
        ask(f"Delete {pluralize(len(runs), 'run')} for good", questions, "gputrain runs trash --empty", yes=yes)
        watch_other_hosts([RunFolder(run.path) for run in runs])
        for_each(runs, delete_for_good)
        typer.echo(f"Deleted {pluralize(len(runs), 'run')}.", err=True)
        return
    if as_json:
        values = [
            {"name": run.name, "entry": run.entry, "folder": str(run.path), "deleted_at": run.deleted_at}
            | {"files": contents[run.entry].files, "size_bytes": contents[run.entry].size_bytes}
            | {"checkpoints": contents[run.entry].checkpoints}
            for run in runs
        ]
        print_json({"runs": values})
    elif runs:
        print_table(trash_columns(contents), runs)


@command(["gputrain runs better val/gap low", "gputrain runs better val/gap auto"])
def better(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of one of your own metrics.")],
    direction: Annotated[
        Literal["low", "high", "auto"],
        typer.Argument(metavar="low|high|auto", help="The values that are better; auto follows the name."),
    ],
    runs_dir: RunsDirOption = None,
) -> None:
    """Set which values of one of your own metrics are better."""
    name = parse_metric_name(name)
    run_list = RunList(runs_root(runs_dir))
    store_direction(run_list.root, name, DIRECTIONS.get(direction))
    run_list.poll()
    known = own_metrics(row.record for row in run_list.rows)
    if name not in known:
        found = nearest(name, known)
        advice = "" if found is None else f"did you mean {found}?"
        print_warning(Problem(name, f"is no metric of the runs in {run_list.root}", advice, code="unknown-key"))
    typer.echo(f"{printable(name)}: {DIRECTIONS.get(direction) or better_of_name(name)} is better", err=True)


def _label(
    folders: Sequence[RunFolder], change: Callable[[RunLabels], RunLabels], describe: Callable[[RunLabels], str]
) -> None:
    """Change the labels of runs, and print what they are now. Raises UsageError with all problems."""

    def act(folder: RunFolder) -> None:
        labels = change_labels(folder, change)
        typer.echo(f"{printable(folder.name)}: {describe(labels)}".rstrip(), err=True)

    for_each(folders, act)


def trash_columns(contents: Mapping[str, RunContents]) -> list[Column[TrashedRun]]:
    """Return the columns for runs whose contents are known by the name of their entry."""
    return [
        Column("name", "name", lambda run: run.entry),
        Column("deleted", "deleted", lambda run: f"{format_age(max(time.time() - run.deleted_at, 0))} ago"),
        Column("size", "size", lambda run: format_bytes(contents[run.entry].size_bytes), Align.RIGHT),
        Column("checkpoints", "checkpoints", lambda run: format_count(contents[run.entry].checkpoints), Align.RIGHT),
    ]
