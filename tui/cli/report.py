"""`gputrain report`: a page of HTML about runs, or a figure of their curves for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.base.errors import UsageError
from engine.base.files import expand_user
from engine.base.text import printable
from engine.runs.folder import RunFolder
from engine.runs.metric_directions import read_directions
from engine.runs.root import runs_root
from engine.watch.folders import require_unwatched
from tui.cli.command import command
from tui.cli.console import print_json, print_warning, reading_line
from tui.cli.options import (
    OR_PATH,
    ForceOption,
    JsonOption,
    RunsDirOption,
    TrustOwnerOption,
    output_option,
    run_argument,
)
from tui.cli.run_options import find_any_runs

PAGE_SUFFIXES = (".html", ".htm")
DEFAULT_OUTPUT = "report.html"
Axis = Literal["epoch", "step", "hours"]


@command(
    [
        "gputrain report last",
        "gputrain report last -o curves.pdf",
        "gputrain report digits-1 digits-2 digits-3 -o seeds.html",
        "gputrain report digits-1 digits-2 --metric accuracy -o accuracy.svg",
        "gputrain report lightning_logs -o curves.png    runs of another program",
    ],
    "Metrics: loss, accuracy, train_loss, val_loss, train_accuracy, val_accuracy, val_top5, ema_val_loss, "
    "ema_val_accuracy, lr, grad_norm, images_per_second, data_wait, seconds, and others by their names.",
    "Needs the extra report, with matplotlib and jinja2; in a clone of gputrain: pip install '.[report]'",
)
def report(
    *,
    runs: Annotated[list[str], run_argument("RUN...", OR_PATH, reads=True)],
    output: Annotated[
        str | None, output_option("FILE.html, or a figure: FILE.svg, .pdf or .png. [default: report.html]")
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="METRIC", help="Metric of a panel; repeat for more [default: loss, accuracy]"),
    ] = None,
    x: Annotated[Axis | None, typer.Option("--x", help="x axis of a figure [default: epoch, else step]")] = None,
    log: Annotated[bool, typer.Option("--log", help="Logarithmic y axis, except for shares.")] = False,
    force: ForceOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a report of runs as one HTML file, or as a figure.

    The page has curves, figures, config, hardware, bottleneck, confusion matrix, and the command that repeats the run.

    With -o FILE.svg, .pdf or .png, the file is one figure for a paper. Runs that differ in the seed alone are one
    curve: their mean, and their standard deviation as a band. An earlier report is
    replaced.

    A path stands for all runs that other programs have written below it: a page has a chart for each of their metrics.
    """
    from engine.report.foreign_run import as_foreign
    from engine.report.page import make_page
    from engine.report.plot import check_output, file_format, make_plot, write_output

    path = expand_user(output or DEFAULT_OUTPUT)
    is_page = path.suffix.casefold() in PAGE_SUFFIXES
    kind = "" if is_page else file_format(path)
    figure_options = {"--metric": metrics, "--x": x, "--log": log or None}
    for name in (name for name, value in figure_options.items() if is_page and value is not None):
        advice = "write a figure: -o curves.pdf, .svg or .png"
        raise UsageError.one(name, f"has no effect on the page {path}", advice, code="no-effect")
    directions = read_directions(runs_root(runs_dir))
    found = find_any_runs(runs, runs_dir, trust_owner=trust_owner)
    foreign = [run.folder for run in found if not isinstance(run, RunFolder)]
    if output is None and foreign:
        require_unwatched(Path.cwd(), [*foreign, *map(expand_user, runs)])
    check_output(path, force=force)
    shown = list(map(as_foreign, found))
    with reading_line(shown) as on_read:
        if is_page:
            data = make_page(shown, directions, on_read).encode(errors="replace")
        else:
            data = make_plot(
                shown, kind, metrics=metrics or (), axis=x, log=log, directions=directions, warn=print_warning,
                on_read=on_read,
            )  # fmt: skip
    written = write_output(path, data, force=force)
    if as_json:
        print_json({"runs": [run.name for run in found], "file": str(written)})
    else:
        typer.echo(printable(str(written)))
