"""The run screen redraws only what a key or a new event changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import demo_app, visible_text, wait_until
from support.screen.screen_driver import drive, press, wait_for_frame
from tui.charts.plot import draw_curve
from tui.demo.server import FINISHED_RUN
from tui.widgets.chart import Chart

pytestmark = pytest.mark.usefixtures("isolated_folder")


def test_run_screen_draws_no_curve_when_cursor_moves(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "left")
        drawn, shown = draw_curve.cache_info(), visible_text(pilot, "#loss")
        # `press` draws all charts after each key.
        await pilot.press("left", "left", "right")
        await wait_for_frame(pilot)
        assert draw_curve.cache_info() == drawn
        assert visible_text(pilot, "#loss") != shown

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (160, 48))


def test_run_screen_draws_only_charts_that_a_key_changes(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        charts = pilot.app.screen.query(Chart)
        plots = {chart.id: chart.drawn_plot for chart in charts}
        await pilot.press("m")
        await wait_for_frame(pilot)
        assert {chart.id for chart in charts if chart.drawn_plot is not plots[chart.id]} == {"loss", "grad_norm"}

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (160, 48))


def test_run_screen_draws_curves_once_for_epochs_steps_and_images(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        misses = draw_curve.cache_info().misses
        await press(pilot, "x", "x")
        assert draw_curve.cache_info().misses == misses
        assert "images" in visible_text(pilot, "#loss")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (160, 48))


def test_run_screen_redraws_panels_whose_focus_changes_alone(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await wait_for_frame(pilot)
        # `press` would draw all charts.
        pilot.app.screen.set_focus(pilot.app.screen.query_one("#accuracy"))
        assert not pilot.app.screen._repaint_required

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (160, 48))


def test_run_screen_draws_chart_that_appears_in_larger_terminal(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        chart = pilot.app.screen.query_one("#lr")
        assert not chart.display
        await pilot.resize_terminal(160, 48)
        # `wait_until_idle` would draw the charts.
        await wait_until(pilot, lambda: chart.display and "3e-6" in visible_text(pilot, "#lr"), seconds=5)

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (80, 24))
