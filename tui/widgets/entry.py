"""A line to type in, without a blinking cursor: over a slow link nothing is sent while nothing happens."""

from __future__ import annotations

from textual.binding import Binding
from textual.events import Key
from textual.widgets import Input

# Key -> what Textual's own line does at it.
INPUT_ACTIONS = {
    key: binding.action for binding in Input.BINDINGS if isinstance(binding, Binding) for key in binding.key.split(",")
}


class Entry(Input):
    def __init__(self, value: str = "", *, id: str | None = None, placeholder: str = "") -> None:  # noqa: A002 (Textual's name)
        super().__init__(value, id=id, compact=True, placeholder=placeholder)
        self.cursor_blink = False

    async def _on_key(self, event: Key) -> None:
        """Textual puts letters in at once, and does what is bound to a key only when that has come up to the app: of
        keys that are typed fast, or come in one piece over a slow link, the letters would overtake the rest."""
        if (action := INPUT_ACTIONS.get(event.key)) is not None:
            event.stop()
            event.prevent_default()
            await self.run_action(action)
            return
        await super()._on_key(event)
