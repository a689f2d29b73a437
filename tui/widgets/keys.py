"""The footer: the commands of a screen that work at the moment, with their keys. Each can be clicked.

`tui.keymap` holds the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.widget import Widget

from tui.keymap import Command
from tui.palette import ACCENT, MUTED

GAP_COLUMNS = 2


class Keys(Widget):
    """A one-line footer. In a narrow terminal it omits commands of low priority and keeps the order of the table."""

    def __init__(
        self, commands: Sequence[Command], is_available: Callable[[str], bool], title_of: Callable[[Command], str]
    ) -> None:
        super().__init__()
        self._commands = [command for command in commands if command.priority > 0]
        self._is_available, self._title_of = is_available, title_of
        self._titles: list[tuple[Command, str]] = []

    def update_commands(self) -> None:
        """Update the commands that work and their titles."""
        titles = [
            (command, self._title_of(command)) for command in self._commands if self._is_available(command.action)
        ]
        if titles != self._titles:
            self._titles = titles
            self.refresh()

    def on_mount(self) -> None:
        # What works depends on widgets that may not be mounted yet.
        self.call_after_refresh(self.update_commands)

    def _visible_commands(self) -> list[tuple[int, Command, str]]:
        """Return the first column, the command and its title for the commands that fit."""
        room, visible = self.size.width - 1, []
        for command, title in sorted(self._titles, key=lambda titled: -titled[0].priority):
            if (length := _columns(command, title)) > room:
                break
            room -= length + GAP_COLUMNS
            visible.append(command)
        column, positions = 1, []
        for command, title in self._titles:
            if command in visible:
                positions.append((column, command, title))
                column += _columns(command, title) + GAP_COLUMNS
        return positions

    def render(self) -> Text:
        line = Text(no_wrap=True, end="")
        for column, command, title in self._visible_commands():
            line.append(" " * (column - line.cell_len))
            line.append(command.key_label, ACCENT)
            line.append(f" {title}", MUTED)
        return line

    async def on_click(self, event: events.Click) -> None:
        for column, command, title in self._visible_commands():
            if column <= event.x < column + _columns(command, title):
                await self.screen.run_action(command.action)


def _columns(command: Command, title: str) -> int:
    return cell_len(command.key_label) + 1 + cell_len(title)
