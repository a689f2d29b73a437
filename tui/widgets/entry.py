"""A line to type in, without a blinking cursor: over a slow link nothing is sent while nothing happens."""

from __future__ import annotations

from textual.widgets import Input


class Entry(Input):
    def __init__(self, value: str = "", *, id: str | None = None, hint: str = "") -> None:  # noqa: A002 (Textual's name)
        super().__init__(value, id=id, compact=True, placeholder=hint)
        self.cursor_blink = False
