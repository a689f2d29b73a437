"""The last line of a screen: the keys that do something here, as many as find room. Each can be clicked."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.widget import Widget

from tui.keymap import Command

GAP = 2


class Keys(Widget):
    """One line. Where it is narrow those of a lower rank are left out; the order stays that of the table."""

    def __init__(self, commands: Sequence[Command]) -> None:
        super().__init__()
        self._commands = [command for command in commands if command.rank > 0]

    def _shown(self) -> list[tuple[int, Command]]:
        """Each command that finds room, with the column that it begins in."""
        room, kept = self.size.width - 1, []
        for command in sorted(self._commands, key=lambda command: -command.rank):
            if (length := _length(command)) > room:
                break
            room -= length + GAP
            kept.append(command)
        column, places = 1, []
        for command in self._commands:
            if command in kept:
                places.append((column, command))
                column += _length(command) + GAP
        return places

    def render(self) -> Text:
        line = Text(no_wrap=True, end="")
        for column, command in self._shown():
            line.append(" " * (column - line.cell_len))
            line.append(command.shown_key, "bold reverse")
            line.append(f" {command.title}")
        return line

    async def on_click(self, event: events.Click) -> None:
        for column, command in self._shown():
            if column <= event.x < column + _length(command):
                await self.screen.run_action(command.action)


def _length(command: Command) -> int:
    return cell_len(command.shown_key) + 1 + cell_len(command.title)
