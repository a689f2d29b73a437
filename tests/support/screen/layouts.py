"""Check how a screen arranges its panels at several sizes of the terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from itertools import combinations, groupby

from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget

from support.screen.demo_app import clipped_widgets, wait_until_idle
from tui.screens.widgets.keys import Keys

Size = tuple[int, int]


async def each_layout(pilot: Pilot[None], layouts: Mapping[Size, str], *, fills: bool = True) -> AsyncIterator[Size]:
    """Resize the terminal, check the layout of the screen on top, and yield the size.

    `layouts` are the IDs of the panels below the title, from top to bottom: in `gpus / processes runs`, the last two
    begin in the same row. At each size, no widget covers another. With `fills`, they leave no cell blank, as panels of
    unequal height or with a common frame do. A larger terminal has all keys of a smaller one in its footer.
    """
    smaller: set[str] = set()
    for size, layout in layouts.items():
        await pilot.resize_terminal(*size)
        # A panel that just appeared has its size only in the second update.
        for _ in range(2):
            await wait_until_idle(pilot)
        screen = pilot.app.screen
        widgets = shown_widgets(screen)
        panels = [widget for widget in widgets if widget.id and widget.id != "title"]
        rows = groupby(sorted(panels, key=lambda panel: (panel.region.y, panel.region.x)), lambda panel: panel.region.y)
        assert " / ".join(" ".join(str(panel.id) for panel in row) for _, row in rows) == layout, size
        assert not fills or sum(widget.region.area for widget in widgets) == screen.region.area, size
        assert not [pair for pair in combinations(widgets, 2) if pair[0].region.overlaps(pair[1].region)], size
        assert clipped_widgets(screen) == [], size
        actions = {key.action for _, key, _ in screen.query_one(Keys)._visible_keys()}
        assert "app.help" in actions and smaller <= actions, size
        smaller = actions
        yield size


def shown_widgets(screen: Screen[None]) -> list[Widget]:
    """Return the widgets that the screen consists of, without those that lie over another one."""
    widgets = [widget for widget in screen.query("*") if widget.region and not widget.children]
    return [widget for widget in widgets if widget.styles.position != "absolute"]
