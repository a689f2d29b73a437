"""Opens the screen: on the GPU monitor, a run, a run that is starting, or the demo server."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.runs.find import find_run
from engine.runs.folder import RunFolder
from engine.runs.root import runs_root
from engine.runs.run_row import open_run
from tui.cli.terminal import plain_commands, require_terminal
from tui.screens.app import GputrainApp
from tui.screens.launcher import CALLED_HOST
from tui.screens.pollers.host import GpuPoller
from tui.screens.pollers.watched import LOW_BANDWIDTH_INTERVALS, RefreshIntervals
from tui.screens.services import AppServices
from tui.terminal.characters import limit_characters

if TYPE_CHECKING:
    from engine.watch.reading import ColumnChoice
    from tui.screens.demo.server import DemoServer


def open_screen(
    runs_dir: str | None = None,
    *,
    run: str | RunFolder | None = None,
    low_bandwidth: bool = False,
    trust_owner: bool = False,
    first: Callable[[AppServices], object] | None = None,
    watched: Sequence[Path] = (),
    column_choice: ColumnChoice | None = None,
    hosts: str | None = None,
) -> None:
    """Open the screen until the user quits, then exit: on the screen that `first` opens, on a run, else on the GPU
    monitor. Raises UsageError if there is no terminal or no such run, or for a wrong name among `hosts`, the other
    hosts that the monitor follows."""
    # Not for the runs that the screen starts.
    called_host = os.environ.pop(CALLED_HOST, "")
    named = [] if run is None else [run if isinstance(run, str) else str(run.path)]
    names = () if called_host else None if hosts is None else _parse_hosts(hosts)
    require_terminal(*plain_commands(named, runs_dir))
    root = runs_root(runs_dir)
    if isinstance(run, str):
        run = find_run(root, run, trust_owner=trust_owner, reads=True)
    if run is not None:
        root, first = run.path.parent, partial(AppServices.open_run, folder=str(run.path))
    elif watched:
        from tui.screens.runs import RunsScreen

        def first(app: AppServices) -> None:
            app.open_watched(RunsScreen(app, watched))

    app = GputrainApp(
        root,
        first=first,
        intervals=LOW_BANDWIDTH_INTERVALS if low_bandwidth else RefreshIntervals(),
        column_choice=column_choice,
        hosts=names,
        called_host=called_host,
    )
    run_app(app)
    exit_after_screen(app)


def _parse_hosts(names: str) -> tuple[str, ...]:
    from engine.jobs.hosts.channel import parse_hosts

    return parse_hosts(names)


def open_demo(low_bandwidth: bool = False, hosts: str | None = None) -> None:
    """Open the screen on a simulated server, with simulated `hosts` besides. Raises UsageError if there is no terminal,
    and for a wrong name among the hosts."""
    require_terminal(*plain_commands([], None))
    from tui.screens.demo.server import DemoServer

    with DemoServer() as server:
        os.environ["GPUTRAIN_RESERVATIONS"] = str(server.reservations)
        app = demo_app(server, LOW_BANDWIDTH_INTERVALS if low_bandwidth else RefreshIntervals())
        if hosts is not None:
            from tui.screens.demo.hosts import DemoHosts

            app.host_watch = DemoHosts(hosts)
        run_app(app)
    exit_after_screen(app)


def run_app(app: GputrainApp) -> None:
    """Run the app until its end, with what the terminal can draw."""
    if sys.__stderr__ is None or not sys.__stderr__.isatty():
        # Textual draws on this stream; messages go to sys.stderr, which stays redirected.
        sys.__stderr__ = sys.__stdout__  # type: ignore[misc]
    # An escape of what the encoding lacks would take up to ten cells.
    limit_characters(sys.__stderr__, "replace")
    app.run()


def demo_app(server: DemoServer, pace: RefreshIntervals) -> GputrainApp:
    """Return the app on a replayed server."""
    from tui.screens.demo.server import DEMO_NOTICE

    poller = GpuPoller(pace.poll_s, server.gpu_monitor(pace.poll_s))
    for snapshot in server.past_gpus():
        poller.loads.record(snapshot)
    return GputrainApp(
        server.runs_dir,
        intervals=pace,
        gpu_poller=poller,
        demo_notice=DEMO_NOTICE,
    )


def exit_after_screen(app: GputrainApp) -> None:
    """Print how to come back to the live runs of this session, or the output of runs that have not started, and exit
    with the exit code of the screen or of those runs."""
    code = app.return_code or 0
    if code == 1:
        print("The screen crashed; runs continue. Reopen the latest run: gputrain attach last", file=sys.stderr)
    for launched in app.pending_runs:
        # The run has no folder yet, so this output is the only record of a failed start.
        for line in launched.output_lines():
            print(line, file=sys.stderr)
        if launched.exit_code is None:
            print("The run is still starting. List runs: gputrain runs", file=sys.stderr)
        code = code or launched.exit_code or 0
    for folder in live_runs(app):
        # A name is enough where the commands look for runs.
        run = folder.name if folder.path.parent == runs_root() else shlex.quote(str(folder.path))
        run = f"{app.called_host}:{run}" if app.called_host else run
        print(f"{folder.name} goes on in {folder.path}. To return: gputrain attach {run}", file=sys.stderr)
    sys.exit(code)


def live_runs(app: GputrainApp) -> list[RunFolder]:
    """Return the live ones of the runs that were opened or started in this session; none of the demo's."""
    if app.demo_notice is not None:
        return []
    return [folder for folder in app.opened_runs if open_run(folder).live]
