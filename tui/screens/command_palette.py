"""The search of the commands of a screen: Textual's command palette, on a screen that can be resized."""

from __future__ import annotations

from textual.command import CommandPalette

from tui.screens.base import ResizableScreen


class ResizableCommandPalette(CommandPalette, ResizableScreen[None]):
    """Opened by `App.action_command_palette`."""
