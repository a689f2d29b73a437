"""The monitor, the list of runs, and the parts shared by all screens, driven by key presses on a simulated server."""

from __future__ import annotations

import dataclasses
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.pilot import Pilot

from engine.base.process import process_start_ticks
from support.screen.demo_app import (
    demo_app,
    visible_text,
    wait_until,
    wait_until_idle,
)
from support.screen.screen_driver import drive, press, real_app
from tui.screens import keymap
from tui.screens.app import GputrainApp
from tui.screens.base import Dialog, GputrainScreen
from tui.screens.charts import ChartScreen
from tui.screens.dialogs import ChoiceDialog, LogDialog, MultiChoiceDialog, TextDialog
from tui.screens.form import FormScreen
from tui.screens.gpu import GpuScreen
from tui.screens.monitor import MonitorScreen
from tui.screens.process import ProcessScreen
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.screens.widgets.keys import Keys
from tui.screens.widgets.lines import Lines
from tui.screens.widgets.matrix import Matrix

pytestmark = pytest.mark.usefixtures("isolated_folder")


# Monitor


def test_monitor_screen_signals_only_process_that_was_shown(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:

        async def act(pilot: Pilot[None]) -> None:
            monitor = pilot.app.screen
            assert isinstance(monitor, MonitorScreen)
            monitor.send_signal(sleeper.pid, None, 15)
            assert sleeper.poll() is None
            monitor.send_signal(sleeper.pid, process_start_ticks(sleeper.pid), 15)

        drive(real_app(tmp_path / "runs"), act)
        assert sleeper.wait(5) == -15


# All screens


SCREENS = (MonitorScreen, RunScreen, RunsScreen, ProcessScreen, FormScreen, GpuScreen)
SCREENS_WITH_CHARTS = ChartScreen.__subclasses__()


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.__name__)
def test_screen_implements_every_key_of_its_table(screen: type[Any]) -> None:
    for key in (*screen.SCREEN_KEYS, *screen.SHARED_KEYS):
        name = key.action.partition("(")[0]
        owner = GputrainApp if name.startswith("app.") else screen
        assert hasattr(owner, f"action_{name.removeprefix('app.')}"), key


def test_letter_has_one_meaning_in_whole_program() -> None:
    names = [name for key in keymap.KEYS.values() for name in key.keys]
    assert len(names) == len(set(names))
    for screen in GputrainScreen.__subclasses__() + SCREENS_WITH_CHARTS:
        rows = [dataclasses.replace(key, rank=math.inf) for key in screen.SCREEN_KEYS]
        assert all(key is keymap.KEYS[key.action] or key == keymap.KEYS[key.action] for key in rows)
    # Those of lists and dialogs, which have no table.
    for owner in (Dialog, ChoiceDialog, MultiChoiceDialog, TextDialog, LogDialog, Lines, Matrix):
        for binding in owner.BINDINGS:
            assert isinstance(binding, Binding)
            letters = {name for name in binding.key.split(",") if len(name) == 1}
            assert letters <= {"j", "k", "g", "G"} or (binding.key, binding.action) == ("q", "app.quit")


LEVELS = {
    "filter-of-monitor": ("slash", "x"),
    "kept-filter-of-runs": ("r", "slash", "r", "enter"),
    "help-over-full-chart": ("r", "enter", "f", "question_mark"),
    "log-of-run": ("r", "enter", "l"),
    "full-chart-of-comparison": ("r", "M", "c", "f"),
    "gpu": ("enter", "question_mark"),
    "sort-dialog": ("r", "o"),
    "question": ("r", "j", "D"),
    "queue": ("Q", "question_mark"),
    "search-in-form": ("n", "ctrl+f"),
    "own-script": ("f2",),
}


def test_escape_leaves_exactly_one_level(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        def level() -> tuple[object, ...]:
            screen: Any = pilot.app.screen
            searching = isinstance(screen, FormScreen) and screen.fields.searching
            full = isinstance(screen, ChartScreen) and screen.panels.is_full
            is_filtered = isinstance(screen, GputrainScreen) and screen.has_open_filter
            return len(pilot.app.screen_stack), is_filtered, full, searching

        for name, keys in LEVELS.items():
            levels = [level()]
            for key in keys:
                await press(pilot, key)
                if level() != levels[-1]:
                    levels.append(level())
            assert len(levels) > 1, name
            for expected in reversed(levels[:-1]):
                await press(pilot, "escape")
                assert level() == expected, name

    drive(demo_app(demo_runs_folder, demo=None), act, (120, 34))


@pytest.mark.parametrize("keys", [("r", "enter", "f"), ("question_mark",), ("r", "o")])
def test_q_quits_from_every_screen_and_dialog(demo_runs_folder: Path, keys: tuple[str, ...]) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, *keys)
        await pilot.press("q")
        await wait_until(pilot, lambda: not pilot.app.is_running)

    drive(demo_app(demo_runs_folder), act)


def test_footer_shows_keys_of_typing_while_filter_is_typed(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "slash", "n")
        footer = " ".join(visible_text(pilot, "Keys").split())
        assert footer == "enter keep esc clear F1 help ^c quit"
        await press(pilot, "enter")
        assert "esc clear filter" in visible_text(pilot, "Keys") and "o sort" in visible_text(pilot, "Keys")

    drive(demo_app(demo_runs_folder), act)


def test_footer_and_help_follow_the_table_of_keys(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        for key in keymap.MONITOR_KEYS:
            title = f"{key.key_label} {screen.title_of(key)}"
            assert (title in visible_text(pilot, "Keys")) is screen.is_available(key.action)
        await press(pilot, "question_mark")
        for key in (*keymap.MONITOR_KEYS, *keymap.GLOBAL_KEYS):
            assert key.help in visible_text(pilot)

    drive(demo_app(demo_runs_folder), act, (160, 48))


async def look(pilot: Pilot[None]) -> tuple[object, ...]:
    """Return what a key may change: the screen, its text, focus, messages, clipboard and theme."""
    app: Any = pilot.app
    toasts = tuple(toast.message for toast in app._notifications)
    cells = [strip.text for strip in app.screen._compositor.render_strips()]
    return app.screen, cells, app.screen.focused, toasts, app.clipboard, app.theme


FOOTERS = {"monitor": (), "gpu": ("enter",), "runs": ("r", "j"), "run": ("r", "j", "enter")}
"""The keys that open screens from the monitor. `test_form_keys.py` presses those of the footer of the form."""


@pytest.mark.parametrize("keys", FOOTERS.values(), ids=FOOTERS)
def test_each_key_of_the_footer_acts(demo_runs_folder: Path, keys: tuple[str, ...]) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, *keys)
        screen: Any = pilot.app.screen
        shown = [key for key, _ in screen.query_one(Keys).shown if key.action not in ("app.quit", "back")]
        assert len(shown) > 4
        for key in shown:
            pilot.app.clear_notifications()
            before = await look(pilot)
            await press(pilot, key.keys[0])
            assert await look(pilot) != before, key
            while pilot.app.screen is not screen:
                await press(pilot, "escape")

    drive(demo_app(demo_runs_folder), act, (200, 40), notifications=True)


def test_footer_key_click_acts_like_key_press(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        column = visible_text(pilot, "Keys").index("runs")
        await pilot.click(Keys, offset=(column, 0))
        await wait_until_idle(pilot)
        assert isinstance(pilot.app.screen, RunsScreen)

    drive(demo_app(demo_runs_folder), act)


def test_demo_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tui.cli.open_tui import demo_app
    from tui.screens.demo.server import DemoServer
    from tui.screens.pollers.watched import RefreshIntervals

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
