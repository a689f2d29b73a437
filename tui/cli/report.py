"""`gputrain report`: a page of HTML about runs, to be sent to others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tui.cli.arguments import (
    RUN_HELP,
    JsonOption,
    RunsDirOption,
    TrustOwnerOption,
    exit_on_usage_error,
)
from tui.cli.help import RESULTS, HelpCommand, make_epilog

if TYPE_CHECKING:
    from pathlib import Path

    from engine.runs.folder import RunFolder

app = typer.Typer()

RunsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN [RUN]...", help=f"{RUN_HELP}\nMore runs, on the same curves.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite a file that was not made from these runs.")]


def find_runs(runs: list[str], runs_dir: str | None, *, trust_owner: bool) -> list[RunFolder]:
    """Return the folders of these runs, each once. Raises UsageError."""
    from engine.runs.folder import find_run, runs_root

    root = runs_root(runs_dir)
    found = [find_run(root, run, trust_owner=trust_owner) for run in runs]
    return list({folder.path: folder for folder in found}.values())


def print_written(path: Path, folders: list[RunFolder], *, as_json: bool) -> None:
    """Print the path of the file that was written."""
    from engine.utils.text import printable

    if as_json:
        typer.echo(json.dumps({"format": 1, "runs": [folder.name for folder in folders], "file": str(path)}, indent=2))
    else:
        typer.echo(printable(str(path)))


@app.command(
    cls=HelpCommand,
    rich_help_panel=RESULTS,
    epilog=make_epilog(
        [
            "gputrain report last",
            "gputrain report digits-1 digits-2 digits-3 -o seeds.html",
            "gputrain inspect last && gputrain report last",
        ],
        "Needs matplotlib and jinja2: pip install 'gputrain[report]'",
    ),
)
def report(
    runs: RunsArgument,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default=True)
    ] = "report.html",
    force: ForceOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a page about runs that can be sent: one file of HTML, which needs no network.

    It has curves, figures, config, hardware, what limited the run, the confusion matrix, the worst images of
    `gputrain inspect`, and the command that repeats the run.
    """
    from engine.report.output import check_output, make_mark, write_output
    from engine.report.page import MARK_KIND, make_page
    from engine.utils.files import expand_user

    with exit_on_usage_error():
        folders = find_runs(runs, runs_dir, trust_owner=trust_owner)
        mark = make_mark(MARK_KIND, [folder.name for folder in folders])
        path = expand_user(output)
        check_output(path, mark, force=force)
        page = make_page(folders)
        written = write_output(path, page.encode(errors="replace"), mark, force=force)
    print_written(written, folders, as_json=as_json)
