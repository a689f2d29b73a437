"""The footer: the screen's commands from `tui.keymap` with their keys, as many as fit. Each can be clicked."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.widget import Widget

from tui.keymap import Command

GAP_COLUMNS = 2


class Keys(Widget):
    """A one-line footer. In a narrow terminal it omits commands of low priority and keeps the order of the table."""

    def __init__(self, commands: Sequence[Command]) -> None:
        super().__init__()
        self._commands = [command for command in commands if command.priority > 0]

    def _visible_commands(self) -> list[tuple[int, Command]]:
        """Return the commands that fit, each with its first column."""
        room, visible = self.size.width - 1, []
        for command in sorted(self._commands, key=lambda command: -command.priority):
            if (length := _command_columns(command)) > room:
                break
            room -= length + GAP_COLUMNS
            visible.append(command)
        column, positions = 1, []
        for command in self._commands:
            if command in visible:
                positions.append((column, command))
                column += _command_columns(command) + GAP_COLUMNS
        return positions

    def render(self) -> Text:
        line = Text(no_wrap=True, end="")
        for column, command in self._visible_commands():
            line.append(" " * (column - line.cell_len))
            line.append(command.key_label, "bold reverse")
            line.append(f" {command.title}")
        return line

    async def on_click(self, event: events.Click) -> None:
        for column, command in self._visible_commands():
            if column <= event.x < column + _command_columns(command):
                await self.screen.run_action(command.action)


def _command_columns(command: Command) -> int:
    return cell_len(command.key_label) + 1 + cell_len(command.title)
