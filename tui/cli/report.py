"""`gputrain report` and `gputrain plot`: a page of HTML about runs, and figures for papers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tui.cli.arguments import (
    RUN_HELP,
    BetterOption,
    JsonOption,
    RunsDirOption,
    TrustOwnerOption,
    exit_on_usage_error,
    print_warning,
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
    from engine.runs.find import find_run
    from engine.runs.folder import runs_root

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
    better: BetterOption = None,
    force: ForceOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a report of runs as one HTML file.

    The file needs no network. It has curves, figures, config, hardware, what limited the run, the confusion matrix, the
    worst images of `gputrain inspect`, and the command that repeats the run.
    """
    from engine.report.output import check_output, make_mark, write_output
    from engine.report.page import MARK_KIND, make_page
    from engine.runs.folder import runs_root
    from engine.runs.metric_directions import read_directions
    from engine.utils.files import expand_user

    with exit_on_usage_error():
        folders = find_runs(runs, runs_dir, trust_owner=trust_owner)
        mark = make_mark(MARK_KIND, [folder.name for folder in folders])
        path = expand_user(output)
        check_output(path, mark, force=force)
        page = make_page(folders, read_directions(runs_root(runs_dir), better or ()))
        written = write_output(path, page.encode(errors="replace"), mark, force=force)
    print_written(written, folders, as_json=as_json)


@app.command(
    cls=HelpCommand,
    rich_help_panel=RESULTS,
    epilog=make_epilog(
        [
            "gputrain plot last -o curves.pdf",
            "gputrain plot digits-1 digits-2 --metric accuracy --width column",
            "gputrain plot last --metric train_loss --x step --log -o loss.png",
        ],
        "Metrics: loss, accuracy, train_loss, val_loss, train_accuracy, val_accuracy, val_top5, ema_val_loss, "
        "ema_val_accuracy, lr, grad_norm, images_per_second, data_wait, seconds, and your own by their names. "
        "Needs matplotlib: pip install 'gputrain[report]'",
    ),
)
def plot(
    runs: RunsArgument,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="File to write: .svg, .pdf, .png.", show_default=True),
    ] = "curves.pdf",
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="METRIC", help="Metric of a panel; repeat for more [default: loss, accuracy]"),
    ] = None,
    x: Annotated[
        str, typer.Option("--x", metavar="AXIS", help="x axis: epoch, step, images or hours.", show_default=True)
    ] = "epoch",
    width: Annotated[
        str,
        typer.Option("--width", metavar="WIDTH", help="Inches, 8.2cm, column (3.25 in) or page.", show_default=True),
    ] = "page",
    smooth: Annotated[
        float, typer.Option("--smooth", metavar="SHARE", help="Average single steps over this share of them; 0: not.")
    ] = 0.02,
    log: Annotated[bool, typer.Option("--log", help="Logarithmic y axis, except for shares.")] = False,
    separate: Annotated[
        bool, typer.Option("--separate", help="Do not join runs that differ in the seed alone.")
    ] = False,
    better: BetterOption = None,
    force: ForceOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plot curves of runs for a paper, as vector graphics.

    Runs that differ in the seed alone are one curve: their mean, and their standard deviation as a band.
    """
    from engine.report.output import check_output, make_mark, write_output
    from engine.report.plot import (
        DEFAULT_METRICS,
        MARK_KIND,
        PlotOptions,
        file_format,
        find_axis,
        make_plot,
        parse_width,
    )
    from engine.runs.folder import runs_root
    from engine.runs.metric_directions import read_directions
    from engine.utils.errors import UsageError
    from engine.utils.files import expand_user

    with exit_on_usage_error():
        if not 0 <= smooth <= 1:
            raise UsageError.one(
                "--smooth", f"{smooth:g} is not allowed: must be a share from 0 to 1", code="out-of-range"
            )
        options = PlotOptions(
            metrics=tuple(metrics or DEFAULT_METRICS),
            axis=find_axis(x),
            width_in=parse_width(width),
            smoothing=smooth,
            log=log,
            grouped=not separate,
            directions=read_directions(runs_root(runs_dir), better or ()),
        )
        path = expand_user(output)
        kind = file_format(path)
        folders = find_runs(runs, runs_dir, trust_owner=trust_owner)
        mark = make_mark(MARK_KIND, [folder.name for folder in folders])
        check_output(path, mark, force=force)
        figure = make_plot(folders, options, kind, print_warning)
        written = write_output(path, figure, mark, force=force)
    print_written(written, folders, as_json=as_json)
