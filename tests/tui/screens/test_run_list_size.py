"""The list of runs with many runs: what is read, formatted and drawn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from engine.runs.events import RunFinished
from engine.runs.run_row import RunRow
from engine.show.table import Cell, FittedTable, Line
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.screen.demo_app import visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, real_app
from tui.palette import DARK, rich_theme
from tui.widgets.lines import LazyRows, Lines

# These tests count what is formatted.
pytestmark = pytest.mark.usefixtures("isolated_folder", "all_frames")


def test_lazy_rows_make_the_text_of_visible_rows_only() -> None:
    made: list[int] = []

    def make_text(index: int) -> Text:
        made.append(index)
        return Text(f"row {index}")

    class ListApp(App[None]):
        def compose(self) -> ComposeResult:
            self.console.push_theme(rich_theme(DARK))
            yield Lines(selectable=True)

    async def act() -> None:
        app = ListApp()
        async with app.run_test(size=(40, 12)) as pilot:
            lines = app.query_one(Lines)
            lines.set_rows(LazyRows([str(index) for index in range(10_000)], make_text))
            lines.focus()
            await pilot.pause()
            await pilot.press("G")
            assert lines.selected_key == "9999" and max(made) == 9999
            lines.select_key("5000")
            await pilot.pause()
            # A new order: the cursor follows its row.
            lines.set_rows(LazyRows([str(index) for index in reversed(range(10_000))], make_text))
            assert lines.selected_key == "5000" and lines.selected_index == 4999
            await pilot.pause()
            assert len(made) < 100

    asyncio.run(act())


@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.soak)])
def test_run_list_shows_marks_filters_and_sorts_many_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    root = tmp_path / "runs"
    for number in range(count):
        end = RunFinished(time=3.0, state="failed" if number % 10 == 0 else "finished")
        make_run_folder(root, f"run-{number:05d}", make_run_started(1.0), make_epoch(1, number / count, 2.0), end)
    formatted: list[str] = []
    line = FittedTable.line

    def note_line(table: FittedTable[Any], row: Any, rest: tuple[str, Cell] | None = None) -> Line:
        if isinstance(row, RunRow):
            formatted.append(row.name)
        return line(table, row, rest)

    monkeypatch.setattr(FittedTable, "line", note_line)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r")
        await wait_until(pilot, lambda: f"{count} runs" in visible_text(pilot, "#all-runs"), 300.0)
        lines = pilot.app.screen.query_one("#all-runs", Lines)
        formatted.clear()
        await press(pilot, "j")
        # The refresh of the screen formats the visible rows again.
        assert len(formatted) <= 4 * lines.size.height
        await pilot.press("slash", *"failed", "enter")
        await wait_until(pilot, lambda: f"{count // 10} of {count} match" in visible_text(pilot, "#all-runs"))
        await wait_until_idle(pilot)
        await press(pilot, "M", "o", *"best", "enter")
        await wait_until(pilot, lambda: f"{count // 10} marked" in visible_text(pilot, "#all-runs"))
        await press(pilot, "g")
        assert Path(lines.selected_key or "").name == f"run-{count - 10:05d}"

    drive(real_app(root), act, (120, 30))
