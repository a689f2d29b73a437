"""The monitor, the list of runs, and the parts shared by all screens, driven by key presses on a simulated server."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import (
    demo_app,
    visible_text,
    wait_until,
    wait_until_idle,
)
from support.screen.screen_driver import drive, press, real_app
from tui import keymap
from tui.app import GputrainApp
from tui.keymap import Ability, KeyProvider
from tui.screens.form import FormScreen
from tui.screens.gpu import GpuScreen
from tui.screens.gpu_processes import ProcessSignaler, process_start_time
from tui.screens.monitor import MonitorScreen
from tui.screens.process import ProcessScreen
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.screens.starting import StartingScreen
from tui.widgets.keys import Keys

pytestmark = pytest.mark.usefixtures("isolated_folder")


# Monitor


def test_monitor_screen_signals_only_process_that_was_shown(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:

        async def act(pilot: Pilot[None]) -> None:
            app: Any = pilot.app
            signaler = ProcessSignaler(app)
            signaler.send(sleeper.pid, None, 15)
            assert sleeper.poll() is None
            signaler.send(sleeper.pid, process_start_time(sleeper.pid), 15)

        drive(real_app(tmp_path / "runs"), act)
        assert sleeper.wait(5) == -15


# All screens


SCREENS = (MonitorScreen, RunScreen, RunsScreen, ProcessScreen, FormScreen, GpuScreen, StartingScreen)
OWN = Ability.WATCH | Ability.CHANGE
COMMAND = OWN | Ability.COMMAND | Ability.CHOOSE
KINDS_OF_RUNS = (Ability.WATCH, Ability.WATCH | Ability.CHOOSE, COMMAND, OWN | Ability.TRAIN)


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.__name__)
def test_screen_implements_every_key_of_its_table(screen: type[Any]) -> None:
    for key in (*screen.SCREEN_KEYS, *keymap.GLOBAL_KEYS):
        name = key.action.partition("(")[0]
        owner = GputrainApp if name.startswith("app.") else screen
        assert hasattr(owner, f"action_{name.removeprefix('app.')}"), key
    for abilities in KINDS_OF_RUNS:
        rows = [key for key in (*screen.SCREEN_KEYS, *screen.SHARED_KEYS) if key.needs in abilities]
        names = [name for key in rows for name in key.keys]
        assert len(names) == len(set(names))


def test_footer_help_and_palette_follow_command_table(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        for key in keymap.MONITOR_KEYS:
            shown = key.priority > 0 and screen.is_available(key.action)
            title = f"{key.key_label} {screen.title_of(key)}"
            assert (title in visible_text(pilot, "Keys")) is shown
        provider = KeyProvider(pilot.app.screen, None)
        commands = [str(hit.display) async for hit in provider.discover()]  # type: ignore[union-attr]
        await press(pilot, "question_mark")
        for key in (*keymap.MONITOR_KEYS, *keymap.GLOBAL_KEYS):
            assert key.help in visible_text(pilot)
            assert any(key.title in text for text in commands)

    drive(demo_app(demo_runs_folder), act, (140, 34))


def test_footer_key_click_acts_like_key_press(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        column = visible_text(pilot, "Keys").index("runs")
        await pilot.click(Keys, offset=(column, 0))
        await wait_until_idle(pilot)
        assert isinstance(pilot.app.screen, RunsScreen)

    drive(demo_app(demo_runs_folder), act)


def test_demo_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tui.cli.open_tui import demo_app
    from tui.demo.server import DemoServer
    from tui.pollers.watched import RefreshIntervals

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with DemoServer() as server:

        async def act(pilot: Pilot[None]) -> None:
            await press(pilot, "tab", "tab", "enter", "p")
            await wait_until(pilot, lambda: "paused" in visible_text(pilot, "#progress"))
            assert "DEMO: simulated server" in visible_text(pilot)

        drive(demo_app(server, RefreshIntervals()), act)
        assert list(tmp_path.glob("gputrain-demo-*"))
    assert not list(tmp_path.glob("gputrain-demo-*"))
