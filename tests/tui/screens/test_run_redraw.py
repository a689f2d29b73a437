"""The run screen redraws only what a key or a new event changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import demo_app, visible_text, wait_until
from support.screen.screen_driver import drive, press, wait_for_frame
from tui.charts.plot import draw_curve
from tui.screens.demo.server import FINISHED_RUN

pytestmark = pytest.mark.usefixtures("isolated_folder")


def test_run_screen_draws_no_curve_when_cursor_moves(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "left")
        drawn, shown = draw_curve.cache_info(), visible_text(pilot, "#chart-0")
        # `press` draws all charts after each key.
        await pilot.press("left", "left", "right")
        await wait_for_frame(pilot)
        assert draw_curve.cache_info() == drawn
        assert visible_text(pilot, "#chart-0") != shown

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (160, 48))


def test_run_screen_draws_chart_that_appears_in_larger_terminal(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        chart = pilot.app.screen.query_one("#chart-2")
        assert not chart.display
        await pilot.resize_terminal(160, 48)
        # `wait_until_idle` would draw the charts.
        await wait_until(pilot, lambda: chart.display and "3e-6" in visible_text(pilot, "#chart-2"), seconds=5)

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (80, 24))
