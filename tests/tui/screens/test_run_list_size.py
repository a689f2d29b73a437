"""The list of runs with many runs: what is read, formatted and drawn."""

from __future__ import annotations

import asyncio

import pytest
from rich.text import Text
from textual.app import App, ComposeResult

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
