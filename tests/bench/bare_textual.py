"""Bare Textual apps that `screen.py` compares with gputrain.

`python bare_textual.py label|form|list|table [COUNT]`
"""

from __future__ import annotations

import sys

from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Input, OptionList, Static

READY = "ready"
COLUMNS = 8


class BareApp(App[None]):
    """One widget of Textual, or one per field, without behavior or style of its own."""

    def __init__(self, kind: str, count: int) -> None:
        super().__init__()
        self._kind, self._count = kind, count
        self.animation_level = "none"

    def compose(self) -> ComposeResult:
        yield Static(READY)
        if self._kind == "form":
            with VerticalScroll(can_focus=False):
                yield from (Input(f"value {number}", compact=True) for number in range(self._count))
        elif self._kind == "list":
            yield OptionList(*(f"option {number}  " + "value " * COLUMNS for number in range(self._count)))
        elif self._kind == "table":
            yield DataTable(cursor_type="row")

    def on_mount(self) -> None:
        for table in self.query(DataTable):
            table.add_columns(*(f"column {number}" for number in range(COLUMNS)))
            table.add_rows([f"value {row}"] * COLUMNS for row in range(self._count))


if __name__ == "__main__":
    BareApp(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0).run()
