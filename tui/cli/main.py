"""The `gputrain` command line: data goes to stdout, messages to stderr. Also defines `gputrain-tui`.

`tui.cli.tree` has the commands. Each imports what it needs when it runs, so that `--help` and completion load neither
torch nor pydantic.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tui.cli.help import CONTEXT_SETTINGS, HelpCommand, LazyGroup
from tui.cli.help_page import make_help
from tui.cli.options import HostsOption, LowBandwidthOption, RunsDirOption, TrustOwnerOption, run_argument
from tui.cli.typer_internals import prepare_shells

prepare_shells()

app = typer.Typer(
    name="gputrain",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT_SETTINGS,
    help=make_help(
        "Watch, run and queue any training on shared GPUs; train image classifiers.",
        [
            "gputrain run digits                  train a preset and watch it",
            "gputrain run -- python train.py      run your own script",
            "gputrain watch PATH                  watch what other programs log",
            "gputrain-tui                         monitor GPUs, configure and start runs",
        ],
    ),
    epilog="\b\n"
    "Options: --help (of a COMMAND, too)  --version  --skill  --install-completion\n"
    "Exit codes: 0 success, 1 failed, 2 usage error, 3 stopped, 124 time is up.",
)
screen_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"gputrain {version('gputrain')}")
        raise typer.Exit


def print_skill(value: bool) -> None:
    if value:
        from importlib.resources import files

        typer.echo((files("tui.cli") / "skill.md").read_text(encoding="utf-8"), nl=False)
        raise typer.Exit


SkillOption = Annotated[
    bool, typer.Option("--skill", callback=print_skill, is_eager=True, help="Print how coding agents use gputrain.")
]
VersionOption = Annotated[
    bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
]


@app.callback()
def gputrain(show_version: VersionOption = False, show_skill: SkillOption = False) -> None:
    """Parse what precedes the command."""


@screen_app.command(
    cls=HelpCommand,
    context_settings=CONTEXT_SETTINGS,
    help=make_help(
        """Monitor GPUs, start runs and watch them train.

        Press ? for help and q to quit. Runs continue when you quit.

        Draws in ASCII where the terminal or the locale has no Unicode. GPUTRAIN_CHARACTERS=ascii or utf-8 decides it.
        """,
        ["gputrain-tui", "gputrain-tui --hosts lab1,lab2", "gputrain-tui --demo", "gputrain-tui last --low-bandwidth"],
    ),
)
def open_tui(
    run: Annotated[str | None, run_argument("[RUN]", reads=True)] = None,
    runs_dir: RunsDirOption = None,
    low_bandwidth: LowBandwidthOption = False,
    trust_owner: TrustOwnerOption = False,
    hosts: HostsOption = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Explore a simulated server with eight GPUs and two runs, and --hosts.")
    ] = False,
) -> None:
    from tui.cli.open_tui import open_demo, open_screen

    if demo:
        open_demo(low_bandwidth, hosts)
    else:
        open_screen(runs_dir, run=run, low_bandwidth=low_bandwidth, trust_owner=trust_owner, hosts=hosts)
