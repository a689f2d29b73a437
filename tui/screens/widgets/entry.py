"""A one-line text input for slow terminals: no blinking cursor, and keys take effect in the order typed."""

from __future__ import annotations

from textual.binding import Binding
from textual.events import Key
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widgets import Input

# Key -> action of Textual's `Input`.
INPUT_ACTIONS = {
    key: binding.action for binding in Input.BINDINGS if isinstance(binding, Binding) for key in binding.key.split(",")
}


class TextEntry(Input):
    """`Input` without a blinking cursor, which would send output over an otherwise idle connection."""

    # The height and the width of the line are fixed, so another value needs no layout of the screen.
    virtual_size = Reactive(Size(0, 0), layout=False)

    def __init__(self, value: str = "", *, id: str | None = None, placeholder: str = "") -> None:  # noqa: A002 (Textual's name)
        super().__init__(value, id=id, compact=True, placeholder=placeholder)
        self.cursor_blink = False

    async def on_key(self, event: Key) -> None:
        """Run key bindings immediately. Textual inserts letters immediately but runs bindings only after the key has
        bubbled up to the app, so letters would overtake keys such as backspace that arrive in the same packet."""
        if (action := INPUT_ACTIONS.get(event.key)) is not None:
            event.stop()
            event.prevent_default()
            await self.run_action(action)
