"""The `gputrain` command line: data goes to stdout, messages to stderr.

Joins the command modules and defines `gputrain-tui`. Each command imports what it needs when it runs, so that `--help`
and completion load neither torch nor pydantic.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tui.cli.arguments import LowBandwidthOption, RunsDirOption, TrustOwnerOption, exit_on_usage_error
from tui.cli.bench import app as bench_app
from tui.cli.compare import app as compare_app
from tui.cli.config import app as config_app
from tui.cli.data import app as data_app
from tui.cli.export import app as export_app
from tui.cli.features import app as features_app
from tui.cli.help import CONTEXT_SETTINGS, GroupedCommands, HelpCommand, make_epilog
from tui.cli.inspect import app as inspect_app
from tui.cli.lr_find import app as lr_find_app
from tui.cli.machine import app as machine_app
from tui.cli.models import app as models_app
from tui.cli.notify import app as notify_app
from tui.cli.pack import app as pack_app
from tui.cli.profile import app as profile_app
from tui.cli.queue import app as queue_app
from tui.cli.report import app as report_app
from tui.cli.run_labels import app as run_list_app
from tui.cli.runs import app as runs_app
from tui.cli.sweep import app as sweep_app
from tui.cli.sync import app as sync_app
from tui.cli.train import app as train_app
from tui.cli.trained import app as trained_app

app = typer.Typer(
    name="gputrain",
    cls=GroupedCommands,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT_SETTINGS,
    epilog=make_epilog(
        [
            "gputrain run --headless digits     train a preset that needs no download",
            "gputrain run flowers.yaml          train your config and watch it on the screen",
            "gputrain attach last               watch the latest run again",
            "gputrain-tui                       monitor GPUs, configure and start runs",
        ],
        "Help for a command: gputrain COMMAND --help",
    ),
)
for commands in (
    train_app,
    config_app,
    sweep_app,
    lr_find_app,
    data_app,
    pack_app,
    models_app,
    bench_app,
    run_list_app,
    runs_app,
    profile_app,
    queue_app,
    compare_app,
    trained_app,
    features_app,
    export_app,
    report_app,
    inspect_app,
    sync_app,
    machine_app,
    notify_app,
):
    app.add_typer(commands, rich_help_panel=commands.rich_help_panel)

screen_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"gputrain {version('gputrain')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
]


@app.callback()
def gputrain(show_version: VersionOption = False) -> None:
    """Train PyTorch models on multiple GPUs from a terminal.

    Runs continue when you disconnect: start one, close the laptop, attach again later.
    """


@screen_app.command(
    cls=HelpCommand,
    context_settings=CONTEXT_SETTINGS,
    epilog=make_epilog(["gputrain-tui", "gputrain-tui --demo", "gputrain-tui last --low-bandwidth"]),
)
def open_tui(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Open the screen of this run: name, prefix, folder, or last.")
    ] = None,
    runs_dir: RunsDirOption = None,
    low_bandwidth: LowBandwidthOption = False,
    trust_owner: TrustOwnerOption = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Explore a simulated server with eight GPUs and two runs.")
    ] = False,
) -> None:
    """Monitor GPUs, start runs and watch them train.

    Press ? for help and q to quit. Runs continue when you quit.
    """
    from tui.cli.open_tui import open_demo, open_screen

    with exit_on_usage_error():
        if demo:
            open_demo(low_bandwidth)
        else:
            open_screen(runs_dir, run=run, low_bandwidth=low_bandwidth, trust_owner=trust_owner)
