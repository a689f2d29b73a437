"""What the cells of the drawn screens show: how full the panels are, and which colors the row under the cursor has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from rich.style import Style
from textual.geometry import Region
from textual.pilot import Pilot
from textual.screen import Screen

from engine.utils.errors import Problem, UsageError
from support.screen.demo_app import demo_app, demo_runs, four_rank_run, no_gpu_feed, visible_text, wait_until
from support.screen.screen_driver import Drive, drive, press
from tui.charts.meter import SQUARE
from tui.palette import ANSI
from tui.theme import save_palette
from tui.widgets.lines import Lines

pytestmark = pytest.mark.usefixtures("frozen_environment")

LARGE = (160, 48)
MAX_BLANK_ROWS = 1 / 4
"""Share of the rows of a panel."""
MAX_BLANK_AREA = (30, 8)
"""Columns and rows outside of the panels."""
BLANK = {" ", "\u2800"}


def drawn_text(screen: Screen[None]) -> list[str]:
    return ["".join(segment.text for segment in strip) for strip in screen._compositor.render_strips()]


def shown_panels(screen: Screen[None]) -> list[Lines]:
    return [panel for panel in screen.query(Lines) if panel.region and panel.is_on_screen]


def blank_shares(screen: Screen[None]) -> dict[str, float]:
    """Return the share of blank rows of each panel, without its frame."""
    text, shares = drawn_text(screen), {}
    for panel in shown_panels(screen):
        inside = panel.region.shrink(panel.styles.gutter)
        rows = [set(text[y][inside.x : inside.right]) - BLANK for y in range(inside.y, inside.bottom)]
        shares[str(panel.id)] = sum(not row for row in rows) / len(rows)
    return shares


def blank_areas(screen: Screen[None], size: tuple[int, int]) -> list[Region]:
    """Return the areas of `size` that are blank and belong to no panel."""
    columns, rows = size
    free = np.array([[character in BLANK for character in line] for line in drawn_text(screen)])
    for panel in shown_panels(screen):
        free[panel.region.y : panel.region.bottom, panel.region.x : panel.region.right] = False
    blank = np.lib.stride_tricks.sliding_window_view(free, (rows, columns)).all((2, 3))
    return [Region(int(x), int(y), columns, rows) for y, x in np.argwhere(blank)]


def checks_room() -> Drive:
    async def act(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        shares = blank_shares(screen)
        assert len(shares) > 4
        assert {name: share for name, share in shares.items() if share > MAX_BLANK_ROWS} == {}
        columns, rows = MAX_BLANK_AREA
        assert blank_areas(screen, (columns + 1, rows + 1)) == []

    return act


def test_monitor_of_eight_gpus_leaves_no_panel_empty() -> None:
    owners = [*demo_runs(Path("runs")), four_rank_run(Path("runs"))]
    drive(demo_app(Path("runs")), checks_room(), LARGE)
    for owner in owners:
        owner.release()


@pytest.mark.parametrize("run", ["wide-4", "digits-3", "cifar-4"])
def test_run_screen_leaves_no_panel_empty(run: str) -> None:
    owners = [*demo_runs(Path("runs")), four_rank_run(Path("runs"))]
    drive(demo_app(Path("runs"), run=run), checks_room(), LARGE)
    for owner in owners:
        owner.release()


@pytest.mark.parametrize("size", [(100, 34), (120, 34), (160, 48)])
def test_preview_legends_fit(size: tuple[int, int]) -> None:
    async def act(pilot: Pilot[None]) -> None:
        legends = [line for line in drawn_text(pilot.app.screen) if "accuracy " in line and "─ " in line]
        assert legends and not any("…" in legend[size[0] // 2 :] for legend in legends)

    owners = demo_runs(Path("runs"))
    drive(demo_app(Path("runs")), act, size)
    owners[0].release()


def test_form_names_peak_of_learning_rate_and_its_axis() -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        chart = pilot.app.screen.query_one("#form-lr", Lines)
        assert "peak 0.1" in str(chart.border_title)
        assert not chart.border_subtitle
        assert "epoch" in visible_text(pilot, "#form-lr")

    drive(demo_app(Path("runs"), no_gpu_feed(), demo=None), act, (120, 34))


def test_scrollbar_of_log_is_where_its_lines_are() -> None:
    async def act(pilot: Pilot[None]) -> None:
        log = pilot.app.screen.query_one("#log", Lines)
        assert log.scroll_y == log.max_scroll_y > 0
        assert log.vertical_scrollbar.position == log.scroll_y

    owners = demo_runs(Path("runs"))
    drive(demo_app(Path("runs"), run="fashion-17"), act, LARGE)
    owners[0].release()


def test_toast_covers_only_lines_of_its_text(tmp_path: Path) -> None:
    async def run_app() -> int:
        app = demo_app(tmp_path / "runs", no_gpu_feed(), demo=None)
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            app.show_toast("Saved")
            await wait_until(pilot, lambda: any(toast.region for toast in app.screen.query("Toast")))
            return app.screen.query_one("Toast").outer_size.height

    assert asyncio.run(run_app()) == 1


def test_toast_of_problem_is_warning(tmp_path: Path) -> None:
    problem = Problem("", "no run is selected", code="not-selected")

    async def run_app() -> list[str]:
        app = demo_app(tmp_path / "runs", no_gpu_feed(), demo=None)
        async with app.run_test(notifications=True) as pilot:
            for message in ("Saved", problem, UsageError([problem])):
                app.show_toast(message)
            await wait_until(pilot, lambda: len(app._notifications) == 3)
            return [toast.severity for toast in app._notifications]

    assert asyncio.run(run_app()) == ["information", "warning", "warning"]


def test_narrow_list_of_runs_shows_whole_eta() -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert "ETA 7m08s" in visible_text(pilot, "#runs")

    owners = demo_runs(Path("runs"))
    drive(demo_app(Path("runs")), act, (100, 30))
    owners[0].release()


@pytest.mark.parametrize("key", ["", "r"])
def test_cursor_of_terminal_colors_reverses_only_plain_text(key: str) -> None:
    """A reversed color fills its cell: the graph of a free GPU would look like one of full load."""

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, *key, "down", "down")
        segments = [segment for strip in pilot.app.screen._compositor.render_strips() for segment in strip]
        under_cursor = [segment for segment in segments if segment.style and segment.style.reverse]
        assert under_cursor and not any(SQUARE in segment.text for segment in under_cursor)
        reversed_styles = [segment.style or Style() for segment in under_cursor]
        assert not any(style.dim or (style.color and not style.color.is_default) for style in reversed_styles)

    save_palette(ANSI)
    owners = demo_runs(Path("runs"))
    drive(demo_app(Path("runs"), demo=None), act, (120, 34))
    owners[0].release()
