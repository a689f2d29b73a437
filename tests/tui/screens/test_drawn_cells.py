"""What the cells of the drawn screens show: how full the panels are, and which colors the row under the cursor has."""

from __future__ import annotations

from pathlib import Path

from rich.style import Style
from textual.pilot import Pilot

from support.screen.demo_app import demo_app
from support.screen.screen_driver import drive, press
from tui.charts.meter import SQUARE
from tui.terminal.palette import ANSI
from tui.terminal.theme import save_palette


def test_cursor_of_terminal_colors_reverses_only_plain_text(live_demo_runs: Path) -> None:
    """A reversed color fills its cell: the graph of a free GPU would look like one of full load."""

    async def act(pilot: Pilot[None]) -> None:
        for key in ("down", "r"):
            await press(pilot, key, "down")
            segments = [segment for strip in pilot.app.screen._compositor.render_strips() for segment in strip]
            under_cursor = [segment for segment in segments if segment.style and segment.style.reverse]
            assert under_cursor and not any(SQUARE in segment.text for segment in under_cursor)
            reversed_styles = [segment.style or Style() for segment in under_cursor]
            assert not any(style.dim or (style.color and not style.color.is_default) for style in reversed_styles)

    save_palette(ANSI)
    drive(demo_app(live_demo_runs, demo=None), act, (120, 34))
