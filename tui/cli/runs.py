"""Commands on existing runs: watch, read the log, stop and resume."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tui.cli.arguments import (
    RUN_HELP,
    DetachedOption,
    DetachOption,
    EventsJsonOption,
    FlagValue,
    HeadlessOption,
    LowBandwidthOption,
    RunArgument,
    RunsDirOption,
    TakeOverOption,
    TrustCodeOption,
    TrustOwnerOption,
    exit_on_usage_error,
    watch_other_hosts,
)
from tui.cli.help import RUNS, HelpCommand, make_epilog
from tui.cli.train import build_request, run_headless, run_with_screen, should_open_screen, start_in_background

app = typer.Typer()


@app.command(
    cls=HelpCommand,
    rich_help_panel=RUNS,
    epilog=make_epilog(["gputrain attach", "gputrain attach fashion-17 --low-bandwidth"]),
)
def attach(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help=f"{RUN_HELP} [default: last]")] = "last",
    runs_dir: RunsDirOption = None,
    low_bandwidth: LowBandwidthOption = False,
    trust_owner: TrustOwnerOption = False,
) -> None:
    """Open the screen of a live or finished run.

    Quitting the screen does not stop the run.
    """
    from tui.cli.open_tui import open_screen

    with exit_on_usage_error():
        open_screen(runs_dir, run=run, low_bandwidth=low_bandwidth, trust_owner=trust_owner)


@app.command(
    cls=HelpCommand,
    rich_help_panel=RUNS,
    epilog=make_epilog(["gputrain logs last", "gputrain logs last --follow"]),
)
def logs(
    run: RunArgument,
    runs_dir: RunsDirOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends or Ctrl-C.")
    ] = False,
    trust_owner: TrustOwnerOption = False,
) -> None:
    """Print the log of a run.

    The log holds the messages of the supervisor and the output of the ranks.
    """
    import time

    from engine.runs.find import find_run
    from engine.runs.folder import runs_root
    from engine.runs.log import LogReader
    from engine.runs.record_completion import open_run
    from engine.utils.errors import UsageError
    from engine.utils.files import shown_path
    from engine.utils.text import printable

    with exit_on_usage_error():
        folder = find_run(runs_root(runs_dir), run, trust_owner=trust_owner)
        try:
            log = LogReader(folder.log)
        except FileNotFoundError:
            typer.echo(f"{printable(folder.name)} has no log yet.", err=True)
            return
        except OSError as error:
            raise UsageError.one(
                str(shown_path(folder.log)), f"cannot be read: {error.strerror}", code="not-readable"
            ) from error
    while True:
        live = follow and open_run(folder).state.live
        for text in log.read():
            sys.stdout.write(text)
        sys.stdout.flush()
        if not live:
            return
        time.sleep(0.3)


@app.command(
    cls=HelpCommand,
    rich_help_panel=RUNS,
    epilog=make_epilog(["gputrain stop last", "gputrain stop fashion-17 --no-wait"]),
)
def stop(
    run: RunArgument,
    runs_dir: RunsDirOption = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return without waiting for the run to stop.")] = False,
    trust_owner: TrustOwnerOption = False,
) -> None:
    """Stop a run at its next step and save a checkpoint.

    Waits until the run has stopped.
    """
    import time

    from engine.runs.control import send_request
    from engine.runs.find import find_run
    from engine.runs.folder import RunState, runs_root
    from engine.runs.record_completion import open_run
    from engine.runs.run_row import claim_message

    with exit_on_usage_error():
        folder = find_run(runs_root(runs_dir), run, trust_owner=trust_owner)
    watch_other_hosts([folder])
    state = open_run(folder).state
    if not state.live:
        typer.echo(f"{folder.name} is not running: it is {state}.", err=True)
        return
    with exit_on_usage_error():
        send_request(folder.control, "stop")
    while not no_wait and state.live:
        time.sleep(0.2)
        state = open_run(folder).state
    why = claim_message(folder, state) if state is RunState.CRASHED else ""
    ended = f"{folder.name} is {state}{f': {why}' if why else ''}."
    typer.echo(f"Sent the stop request to {folder.name}." if no_wait else ended, err=True)


@app.command(
    cls=HelpCommand,
    rich_help_panel=RUNS,
    epilog=make_epilog(["gputrain resume last", "gputrain resume fashion-17 --headless run.epochs=30"]),
)
def resume(
    run: RunArgument,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config change, such as run.epochs=30.")
    ] = None,
    headless: HeadlessOption = False,
    detach: DetachOption = False,
    detached: DetachedOption = False,
    runs_dir: RunsDirOption = None,
    as_json: EventsJsonOption = False,
    take_over: TakeOverOption = False,
    trust_owner: TrustOwnerOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Resume a run from its last checkpoint.

    The run keeps the config it was started with, except for the values set here.
    """
    from engine.config.loader import resolve_config
    from engine.runs.find import find_run
    from engine.runs.folder import runs_root
    from engine.utils.errors import UsageError

    with exit_on_usage_error():
        folder = find_run(runs_root(runs_dir), run, trust_owner=trust_owner)
        if not folder.config.exists():
            raise UsageError.one(folder.name, "has no config.yaml to resume with; start a new run", code="not-found")
        if any("=" not in change for change in changes or []):
            raise UsageError.one(" ".join(changes or []), "set values as section.key=value", code="invalid-value")
        flags: dict[str, tuple[str, FlagValue]] = {
            "run.resume": ("gputrain resume", True),
            "run.name": ("gputrain resume", folder.name),
        }
        root = str(folder.path.parent)
        request = build_request(
            lambda: resolve_config(str(folder.config), changes or [], flags, trust_code=trust_code),
            None,
            root,
            trust_owner=trust_owner,
            trust_code=trust_code,
            take_over=take_over,
            detached=detached,
        )
        if detach and as_json:
            raise UsageError.one("--detach", "cannot be combined with --json", code="conflict")
        if detach:
            start_in_background(request, sys.argv[1:], root)
        elif should_open_screen(headless=headless or as_json):
            run_with_screen(request, sys.argv[1:], root)
        else:
            run_headless(request, as_json=as_json)
