"""The screen of a run that is starting, with a stand-in for the supervisor, and resuming runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.jobs.launch.detached import LaunchedRun
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder, RunState
from support.messages import says
from support.runs.event_factories import make_run_started, make_step
from support.runs.factories import make_run_folder
from support.screen.demo_app import clipped_widgets, demo_app, toasts, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, real_app
from tui.screens.app import GputrainApp
from tui.screens.demo.server import FINISHED_RUN
from tui.screens.form import FormScreen
from tui.screens.run import RunScreen

find_folder = LaunchedRun.find_folder
pytestmark = pytest.mark.usefixtures("isolated_folder", "unchecked")

# Owns a run folder as a supervisor does. A warning precedes the start, as that about a GPU that others use.
SUPERVISOR = """
import os, pathlib, shutil, sys, time
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import Journal
from engine.runs.ownership import Ownership
from support.runs.event_factories import make_run_started
what, root = sys.argv[1], pathlib.Path(os.environ["GPUTRAIN_RUNS"])
run = RunFolder(root / "a-run")
run.path.mkdir(parents=True, mode=0o700, exist_ok=True)
ownership = Ownership(run)
journal = Journal(run.journal)
journal.append(WarningEvent(message="GPU 0 is also used by another process", code="gpu-in-use"))
print("warning: GPU 0 is also used by another process", flush=True)
deadline = time.monotonic() + 40
while not (root / "go").exists() and time.monotonic() < deadline:
    time.sleep(0.02)
if what == "refused":
    shutil.rmtree(run.path)
    print("error: device.gpus: torch cannot use GPU 0 [sm_30]; train on the CPU with --gpus cpu", flush=True)
    sys.exit(2)
journal.append(make_run_started(time.time()))
if what == "failed":
    journal.append(RunFinished(state="failed", message="CUDA out of memory"))
    sys.exit(1)
time.sleep(40)
"""


@pytest.fixture
def searches() -> list[RunFolder | None]:
    """What each search for the folder of the launched run has found."""
    return []


@pytest.fixture
def app(tmp_path: Path, searches: list[RunFolder | None], monkeypatch: pytest.MonkeyPatch) -> GputrainApp:
    """An app whose runs are started by the stand-in."""
    script = tmp_path / "supervisor.py"
    paths = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]
    script.write_text(f"import sys; sys.path[:0] = {paths}\n{SUPERVISOR}")
    monkeypatch.setattr("tui.screens.launcher.gputrain_command", lambda: [sys.executable, str(script)])
    monkeypatch.setattr("engine.jobs.launch.detached.systemd_scope_prefix", lambda: ([], None))

    def find_folder_in_thread(launched: LaunchedRun) -> RunFolder | None:
        # The runs folder may have thousands of runs: keys and frames never wait for it.
        assert threading.current_thread() is not threading.main_thread()
        searches.append(find_folder(launched))
        return searches[-1]

    monkeypatch.setattr(LaunchedRun, "find_folder", find_folder_in_thread)
    (tmp_path / "runs").mkdir(mode=0o700)
    return real_app(tmp_path / "runs")


def let_go(app: GputrainApp) -> None:
    (app.runs_dir / "go").touch()


async def wait_for_warning(pilot: Pilot[None]) -> None:
    await wait_until(pilot, lambda: "is also used" in visible_text(pilot))


def test_screen_of_start_keeps_reason_of_refused_start_after_warning(
    app: GputrainApp, searches: list[RunFolder | None]
) -> None:
    begun: list[str] = []

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form: Any = pilot.app.screen
        form.fields.select("run.name")
        await press(pilot, *"my-name")
        assert app.launch(["refused"], begun=lambda: begun.append("refused"))
        await wait_for_warning(pilot)
        let_go(app)
        await wait_until(pilot, lambda: "✗ not started" in visible_text(pilot, "#progress"))
        finished = len(searches)
        await wait_until(pilot, lambda: len(searches) > finished + 1)
        assert isinstance(pilot.app.screen, RunScreen)
        shown = " ".join(visible_text(pilot, "#log").replace("│", " ").split())
        assert "torch cannot use GPU 0 [sm_30]; train on the CPU with --gpus cpu" in shown
        assert "s stop" not in visible_text(pilot, "Keys")
        for size in ((60, 20), (80, 24)):
            await pilot.resize_terminal(*size)
            await wait_until_idle(pilot)
            assert clipped_widgets(pilot.app.screen) == []
        await press(pilot, "s", "escape")
        assert pilot.app.screen is form
        assert "my-name" in visible_text(pilot)
        assert not app.pending_runs and not begun

    drive(app, act, (60, 20))


def test_screen_of_start_opens_run_that_begins(app: GputrainApp) -> None:
    begun: list[str] = []

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        app.launch(["started"], begun=lambda: begun.append("started"))
        await wait_for_warning(pilot)
        await wait_until(pilot, lambda: "loading torch" in visible_text(pilot, "#progress"))
        assert "a-run" in visible_text(pilot, "#title") and not begun
        [launched] = app.pending_runs
        let_go(app)
        await wait_until(pilot, lambda: getattr(pilot.app.screen, "state", None) is not None)
        await wait_until_idle(pilot)
        assert not any(isinstance(screen, FormScreen) for screen in app.screen_stack)
        assert [folder.name for folder in app.opened_runs] == ["a-run"] and begun == ["started"]
        launched.process.kill()
        launched.process.wait()

    drive(app, act)


def test_run_that_is_resumed_shows_its_curves_while_it_starts_and_opens_once(app: GputrainApp) -> None:
    folder = make_run_folder(app.runs_dir, "a-run", make_run_started(), make_step(10), RunFinished(state="stopped"))

    async def act(pilot: Pilot[None]) -> None:
        app.open_run(str(folder.path))
        await wait_until_idle(pilot)
        opened = pilot.app.screen
        app.launch(["started"], folder)
        await wait_for_warning(pilot)
        await wait_until_idle(pilot)
        assert pilot.app.screen is not opened
        assert "a-run" in visible_text(pilot, "#title") and "loading torch" in visible_text(pilot, "#progress")
        assert "No data yet" not in visible_text(pilot, "#chart-0")
        [launched] = app.pending_runs
        let_go(app)
        await wait_until(pilot, lambda: pilot.app.screen is opened)
        launched.process.kill()
        launched.process.wait()

    drive(app, act)


def test_screen_of_start_stops_run(app: GputrainApp) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app.launch(["started"])
        await wait_for_warning(pilot)
        await press(pilot, "s", "down", "enter")
        await wait_until(pilot, lambda: "✗ not started" in visible_text(pilot, "#progress"))

    drive(app, act)


@pytest.mark.parametrize(
    ("what", "is_report"),
    [
        ("refused", lambda toast: says(toast, "not-started", "torch cannot use GPU 0")),
        ("started", lambda toast: toast == "a-run has started"),
    ],
    ids=["refused", "started"],
)
def test_app_reports_start_whose_screen_was_left(
    app: GputrainApp, monkeypatch: pytest.MonkeyPatch, what: str, is_report: Callable[[str], bool]
) -> None:
    toasts: list[str] = []
    monkeypatch.setattr(app, "show_toast", lambda message, **_: toasts.append(str(message)))

    async def act(pilot: Pilot[None]) -> None:
        app.launch([what])
        await wait_for_warning(pilot)
        [launched] = app.pending_runs
        await press(pilot, "escape")
        let_go(app)
        await wait_until(pilot, lambda: any(map(is_report, toasts)))
        assert not app.pending_runs
        launched.process.kill()
        launched.process.wait()

    drive(app, act)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Any]]:
    """Arguments and titles of the runs that the app starts, instead of the runs."""
    calls: list[tuple[list[str], Any]] = []

    def launch(app: GputrainApp, arguments: Sequence[str], resumed: Any = None) -> bool:
        calls.append((list(arguments), resumed))
        return True

    monkeypatch.setattr(GputrainApp, "launch", launch)
    return calls


def add_checkpoint(run: RunFolder) -> None:
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / "last.pt").touch()


def test_resume_of_finished_run_names_the_command(
    demo_runs_folder: Path, launches: list[tuple[list[str], Any]]
) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app: Any = pilot.app
        app.resume_run(RunFolder(demo_runs_folder / FINISHED_RUN), RunState.FINISHED)
        await wait_until(pilot, lambda: bool(toasts(pilot)))
        assert says(toasts(pilot)[-1], "already-finished", f"`gputrain resume {FINISHED_RUN} --epochs N`")

    drive(demo_app(demo_runs_folder), act, notifications=True)
    assert launches == []
