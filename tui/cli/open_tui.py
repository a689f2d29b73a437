"""Opens the screen: on a run, on one that is being started, on a demonstration."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.runs.folder import RunFolder, find_run, runs_root
from engine.utils.errors import UsageError
from tui.app import CockpitApp
from tui.launcher import Started
from tui.pollers import SLOW, GpuFeed, Pace

if TYPE_CHECKING:
    from tui.demo.server import DemoServer


def open_screen(
    runs_dir: str | None = None,
    *,
    run: str | RunFolder | None = None,
    low_bandwidth: bool = False,
    started: Started | None = None,
) -> None:
    """Raises UsageError where there is no such run, or no terminal."""
    refuse_without_terminal()
    root = started.root if started else runs_root(runs_dir)
    if isinstance(run, str):
        run = find_run(root, run)
    folder = run.path if run is not None else None
    app = CockpitApp(
        folder.parent if folder else root, run=folder, pace=SLOW if low_bandwidth else Pace(), started=started
    )
    app.run()
    leave(app)


def open_demo(low_bandwidth: bool = False) -> None:
    """Raises UsageError where there is no terminal."""
    refuse_without_terminal()
    from tui.demo.server import DemoServer

    with DemoServer() as server:
        app = demo_app(server, SLOW if low_bandwidth else Pace())
        app.run()
    leave(app)


def demo_app(server: DemoServer, pace: Pace) -> CockpitApp:
    """The screen over a replayed server."""
    from tui.demo.server import NOTICE

    return CockpitApp(server.runs_dir, pace=pace, gpus=GpuFeed(pace.look, server.gpu_monitor(pace.look)), demo=NOTICE)


def refuse_without_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError.one(
            "the screen", "needs a terminal; without one, use `gputrain run --headless`, `gputrain runs` and `logs`"
        )


def leave(app: CockpitApp) -> None:
    """What is still to be said when the screen is gone, and the exit code."""
    code = app.return_code or 0
    if code == 1:
        print("The screen failed; runs go on. `gputrain attach last` shows the latest again.", file=sys.stderr)
    if app.pending_run is not None:
        # It has not begun, so it has no folder that could tell.
        for line in app.pending_run.lines():
            print(line, file=sys.stderr)
        if app.pending_run.code is None:
            print("The run is still being set up; `gputrain runs` shows it when it has begun.", file=sys.stderr)
        code = code or app.pending_run.code or 0
    sys.exit(code)
