"""The footer: the keys of a screen that work at the moment, with their titles. Each can be clicked.

`tui.screens.keymap` holds the keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.widget import Widget

from tui.screens.keymap import Key
from tui.terminal.palette import ACCENT, MUTED

GAP_COLUMNS = 2


class Keys(Widget):
    """A one-line footer. In a narrow terminal it omits the last ones, but not the way out."""

    shown: Sequence[tuple[Key, str]] = ()
    """The keys that work, with their titles."""

    def show(self, titles: Sequence[tuple[Key, str]]) -> None:
        """Show the keys that work, with their titles."""
        if titles != self.shown:
            self.shown = titles
            self.refresh()

    def _visible_keys(self) -> list[tuple[int, Key, str]]:
        """Return the first column, the key and its title for the keys that fit."""
        room, visible = self.size.width - 1, []
        for key, title in sorted(self.shown, key=lambda titled: titled[0].rank):
            if (length := _columns(key, title)) > room:
                break
            room -= length + GAP_COLUMNS
            visible.append(key)
        column, positions = 1, []
        for key, title in self.shown:
            if key in visible:
                positions.append((column, key, title))
                column += _columns(key, title) + GAP_COLUMNS
        return positions

    def render(self) -> Text:
        line = Text(no_wrap=True, end="")
        for column, key, title in self._visible_keys():
            line.append(" " * (column - line.cell_len))
            line.append(key.key_label, ACCENT)
            line.append(f" {title}", MUTED)
        return line

    async def on_click(self, event: events.Click) -> None:
        for column, key, title in self._visible_keys():
            if column <= event.x < column + _columns(key, title):
                await self.screen.run_action(key.action)


def _columns(key: Key, title: str) -> int:
    return cell_len(key.key_label) + 1 + cell_len(title)
