"""The input of the form's list of fields, which is over the line under the cursor."""

from __future__ import annotations

from collections.abc import Callable

from textual import events
from textual.widgets import Input

from tui.widgets.entry import INPUT_ACTIONS, TextEntry


class FieldEntry(TextEntry):
    """The input over the field under the cursor. `consume_key` handles a key before the input does, if it can;
    `on_typing` gets the text that the user changed, and `on_clicked` is called for a click."""

    def __init__(
        self, consume_key: Callable[[str], bool], on_typing: Callable[[str], None], on_clicked: Callable[[], None]
    ) -> None:
        super().__init__(id="field-entry")
        self._consume_key, self._on_typing, self._on_clicked = consume_key, on_typing, on_clicked
        self._is_showing = False

    async def on_key(self, event: events.Key) -> None:
        if await self._handle_key(event):
            event.stop()
            event.prevent_default()

    def watch_value(self, value: str) -> None:
        if not self._is_showing:
            self._on_typing(value)

    async def _handle_key(self, event: events.Key) -> bool:
        """Handle a key before the input does. Return whether the key is handled."""
        if self.app.screen is not self.screen:
            # It arrived together with the key that opened a dialog, for which it was typed.
            self.app.post_message(events.Key(event.key, event.character))
            return True
        if self._consume_key(event.key):
            return True
        if event.is_printable or event.key in INPUT_ACTIONS:
            return False
        # Textual runs a command after the key has bubbled up to the screen: letters that follow would be typed here.
        command = self.screen.active_bindings.get(event.key)
        if command is None or command.node not in (self.screen, self.app):
            return False
        await self.app.run_action(command.binding.action, command.node)
        return True

    def on_click(self) -> None:
        self._on_clicked()

    def show(self, text: str) -> None:
        """Replace the text and select it, so that typing replaces it."""
        self._is_showing = True
        with self.prevent(Input.Changed):
            self.value = text
        self._is_showing = False
        self.select_all()
