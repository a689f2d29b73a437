"""Text input: queued keys take effect in the order in which they were typed."""

from __future__ import annotations

import asyncio

import pytest
from textual.app import App, ComposeResult
from textual.events import Key

from tui.screens.widgets.entry import TextEntry


class OneLine(App[None]):
    def compose(self) -> ComposeResult:
        yield TextEntry("600.0", id="value")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["backspace"] * 3 + ["1", "2"], "6012"),
        (["ctrl+u", "4", "5"], "45"),
        (["x", "backspace", "y", "home", "delete", "1"], "100.0y"),
    ],
)
def test_entry_handles_queued_keys_in_order(keys: list[str], value: str) -> None:
    async def type_fast() -> str:
        app = OneLine()
        async with app.run_test() as pilot:
            entry = app.query_one(TextEntry)
            entry.focus()
            await pilot.pause()
            entry.cursor_position = len(entry.value)
            for key in keys:
                app.post_message(Key(key, key if len(key) == 1 else None))
            await pilot.pause()
            await pilot.pause()
            return entry.value

    assert asyncio.run(type_fast()) == value
