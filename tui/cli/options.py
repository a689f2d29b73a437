"""Options and arguments that several commands share: each has one type, one metavar and one beginning of its help.

`tui.cli.config_arguments` has those of config keys, `tui.cli.run_options` those that a run and a trained model need.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from tui.cli.completions import complete_runs

RUN_HELP = "Run name, run folder, or last."
READ_RUN_HELP = "Run name, unambiguous prefix, run folder, or last."
OR_PATH = " Or a path with runs of other programs."
Split = Literal["train", "val", "all"]

RunsDirOption = Annotated[
    str | None, typer.Option("--runs-dir", metavar="DIR", help="Folder of the runs [default: $GPUTRAIN_RUNS or ./runs]")
]
TrustCodeOption = Annotated[
    bool,
    typer.Option("--trust-code", help="Run code and commands that another user can change."),
]
TrustOwnerOption = Annotated[
    bool, typer.Option("--trust-owner", help="Use a run that another user owns or can change.")
]
DetachOption = Annotated[bool, typer.Option("--detach", help="Start in the background and print the name.")]
LowBandwidthOption = Annotated[bool, typer.Option("--low-bandwidth", help="Refresh every 5 s instead of every second.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
HostsOption = Annotated[
    str | None,
    typer.Option("--hosts", metavar="HOST,HOST", help="Ask these hosts through ssh; `all` for those of settings.yaml."),
]
CurvesOption = Annotated[bool, typer.Option("--curves", help="Print each point of all curves, as CSV or --json.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Follow the runs until they end, or Ctrl-C.")]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Return without waiting for the answer.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite what exists.")]
BaselineOption = Annotated[
    str | None,
    typer.Option("--baseline", metavar="RUN", help="Show the differences from this run.", autocompletion=complete_runs),
]


def output_option(what: str) -> Any:
    """Return `-o PATH`. `what` says what is written."""
    return typer.Option("--output", "-o", metavar="PATH", help=f"Write to PATH: {what}")


def count_option(what: str) -> Any:
    """Return `-n N`. `what` names the lines that are printed."""
    return typer.Option("--count", "-n", metavar="N", min=1, help=f"Print at most N {what}.")


def dry_run_option(what: str) -> Any:
    """Return `--dry-run`. `what` says what happens besides."""
    return typer.Option("--dry-run", help=f"Print the plan{what}")


def split_option(what: str) -> Any:
    """Return `--split`. `what` names what is done with the images."""
    return typer.Option("--split", help=f"Images to {what}.")


def run_argument(metavar: str = "RUN", more: str = "", *, reads: bool = False) -> Any:
    """Return the argument of a run, which the shell completes. `more` follows its help.

    A command that only `reads` the run takes the beginning of its name, see `engine.runs.find`."""
    help_text = f"{READ_RUN_HELP if reads else RUN_HELP}{more}"
    return typer.Argument(metavar=metavar, help=help_text, autocompletion=complete_runs)
