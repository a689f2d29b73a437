"""The search of the commands of a screen: Textual's command palette, with a layout that settles."""

from __future__ import annotations

from textual.command import CommandPalette

from tui.screens.base import SettledScreen


class CommandSearch(CommandPalette, SettledScreen[None]):
    """Opened by `App.action_command_palette`."""
