"""Which theme the screens start with, and what a change of the theme repaints."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.base.files import state_folder
from engine.jobs.queue.listing import QueueRow, RowState
from support.screen.demo_app import demo_app, demo_runs, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press
from tui.screens.app import GputrainApp
from tui.terminal.palette import ANSI, DARK, LIGHT, Palette
from tui.terminal.theme import THEME_FILE, initial_palette, save_palette


@pytest.fixture(autouse=True)
def color_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal with all colors, and empty folders of the user."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "GPUTRAIN_RESERVATIONS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_initial_palette_is_the_saved_one() -> None:
    save_palette(LIGHT)
    assert initial_palette() is LIGHT


SAVED_IN_FORMAT_2 = f'{{"format": 2, "theme": "{LIGHT.name}"}}'


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1, "theme": "another"}', '{"format": 1, "theme": 3}', SAVED_IN_FORMAT_2]
)
def test_initial_palette_ignores_invalid_file(text: str) -> None:
    save_palette(LIGHT)
    (state_folder() / THEME_FILE).write_text(text)
    assert initial_palette() is DARK


@pytest.mark.parametrize(
    "variables",
    [
        {"NO_COLOR": "1"},
        {"NO_COLOR": ""},
        {"TERM": "xterm", "COLORTERM": ""},
        {"TERM": "xterm-16color", "COLORTERM": ""},
    ],
)
def test_initial_palette_of_terminal_without_colors_is_its_own(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    save_palette(LIGHT)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert initial_palette() is ANSI


def shown_colors(pilot: Pilot[None]) -> set[str]:
    """Colors of all cells, as #rrggbb, ansi names or `default`."""
    colors = set()
    for strip in pilot.app.screen._compositor.render_strips():
        for segment in strip:
            for color in (segment.style.color, segment.style.bgcolor) if segment.style else ():
                if color is not None:
                    colors.add(color.triplet.hex if color.triplet is not None else color.name)
    return colors


def own_colors(palette: Palette, other: Palette) -> set[str]:
    """Colors that only this one of two palettes has."""

    def colors(palette: Palette) -> set[str]:
        values = [getattr(palette, name) for name in palette.__dataclass_fields__]
        flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        return {str(value) for value in flat if str(value).startswith("#")}

    return colors(palette) - colors(other)


def app_on_runs() -> GputrainApp:
    return demo_app(Path("runs"))


@pytest.fixture
def runs() -> None:
    demo_runs(Path("runs"))[0].release()


SCREENS = {
    "": "#gpus", "n": "#fields", "r question_mark": ".dialog", "r enter": "#chart-0", "r enter v": "#matrix",
}  # fmt: skip
"""The keys that open screens and a dialog from the monitor, and a widget of each: lists, entries, charts, a matrix."""


@pytest.mark.usefixtures("runs")
def test_next_theme_repaints_all_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = QueueRow("a", "me", 1, RowState.WAITING, 1, 0.0, "no GPU is free", "free:1", key="a")
    monkeypatch.setattr("tui.screens.pollers.files.list_queue", lambda: [waiting])

    async def act(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, GputrainApp)
        for keys, widget in SCREENS.items():
            await press(pilot, *keys.split())
            assert app.screen.query(widget), keys
            await wait_until(pilot, lambda: bool(shown_colors(pilot) & own_colors(DARK, LIGHT)))
            app.action_next_theme()
            await wait_until_idle(pilot)
            assert shown_colors(pilot) & own_colors(DARK, LIGHT) == set(), keys
            app.action_next_theme()
            await wait_until_idle(pilot)
            assert shown_colors(pilot) & own_colors(LIGHT, DARK) == set(), keys
            app.action_next_theme()
            while len(app.screen_stack) > 1:
                await press(pilot, "escape")
            await wait_until_idle(pilot)

    drive(app_on_runs(), act, (120, 34))


@pytest.mark.usefixtures("runs")
def test_theme_key_is_remembered_over_restart() -> None:
    async def switch(pilot: Pilot[None]) -> None:
        await press(pilot, "t")
        assert pilot.app.theme == LIGHT.name

    async def check(pilot: Pilot[None]) -> None:
        assert pilot.app.theme == LIGHT.name
        await press(pilot, "t", "t")
        assert pilot.app.theme == DARK.name

    drive(app_on_runs(), switch)
    drive(app_on_runs(), check)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("COLORTERM", "")])
def test_theme_key_keeps_the_theme_of_a_terminal_without_colors(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)

    async def act(pilot: Pilot[None]) -> None:
        for key in "tr":
            await press(pilot, key)
            colors = shown_colors(pilot)
            assert not any(color.startswith("#") for color in colors) and pilot.app.theme == ANSI.name
            assert name != "NO_COLOR" or colors <= {"default"}

    drive(app_on_runs(), act, (120, 34))
