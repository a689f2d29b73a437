"""Dialogs that search what runs can be asked for: the columns of the list, and the column that it is sorted by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from engine.runs.keys import quote_key
from engine.runs.run_view import ColumnChoice, SortOrder
from engine.show.table import Align, Shorten, cell_width, pad
from engine.utils.text import printable
from tui.palette import ACCENT, MUTED
from tui.screens.base import Dialog, Result
from tui.tables.runs import SORT_SIGNS
from tui.widgets.entry import TextEntry
from tui.widgets.lines import KeyedRow, Lines

MAX_SHOWN_ROWS = 14
MAX_KEY_COLUMNS = 28
NO_MATCH = Text("No column has such a name", MUTED)


class SearchEntry(TextEntry):
    """The input of a search. `consume_key` handles a key before the input does, if it can."""

    def __init__(self, consume_key: Callable[[str], bool]) -> None:
        super().__init__(placeholder="Type to search")
        self._consume_key = consume_key

    async def on_key(self, event: events.Key) -> None:
        if self._consume_key(event.key):
            event.stop()
            event.prevent_default()


class SearchDialog(Dialog[Result]):
    """Lists the choices that contain the typed text. Subclasses say what enter and blank do."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("pagedown", "move(10)", show=False),
    ]
    HINT = "type to search   enter choose   esc cancel"

    def __init__(self, title: str, choices: Sequence[ColumnChoice]) -> None:
        super().__init__(title)
        self._choices = list(choices)
        longest = max((cell_width(_shown(choice)) for choice in self._choices), default=0)
        self._key_columns = min(longest, MAX_KEY_COLUMNS)

    def compose_box(self) -> ComposeResult:
        yield SearchEntry(self.consume_key)
        yield Lines(selectable=True)

    def on_mount(self) -> None:
        lines = self.query_one(Lines)
        lines.styles.height = min(len(self._choices), MAX_SHOWN_ROWS)
        lines.can_focus = False
        self.query_one(SearchEntry).focus()
        self.update_rows()

    def update_rows(self) -> None:
        """List the choices that contain the typed text."""
        text = self.query_one(SearchEntry).value.strip().lower()
        shown = [choice for choice in self._choices if text in choice.name.lower()]
        self.query_one(Lines).set_rows([KeyedRow(choice.name, self._line(choice)) for choice in shown], (), NO_MATCH)

    def _line(self, choice: ColumnChoice) -> Text:
        sign, style = self.sign_of(choice.name)
        key = pad(_shown(choice), self._key_columns, mode=Shorten.MIDDLE)
        return Text.assemble((sign, style), (key, style), (f"  {choice.about}", MUTED), no_wrap=True, end="")

    def sign_of(self, key: str) -> tuple[str, str]:
        """Return what is in front of a key, and its style."""
        raise NotImplementedError

    def consume_key(self, key: str) -> bool:
        """Handle a key that is not typed text. Return whether it is handled."""
        return False

    @property
    def selected_key(self) -> str | None:
        """The key under the cursor."""
        return self.query_one(Lines).selected_key

    @on(Input.Changed)
    def _search(self) -> None:
        self.update_rows()
        self.query_one(Lines).action_move(-len(self._choices))

    def action_move(self, rows: int) -> None:
        self.query_one(Lines).action_move(rows)


def _shown(choice: ColumnChoice) -> str:
    """Return a key as it is typed in a filter."""
    return printable(quote_key(choice.name))


class SortDialog(SearchDialog[str]):
    """Choose the column to sort by. Returns its key."""

    def __init__(self, choices: Sequence[ColumnChoice], order: SortOrder) -> None:
        super().__init__("Sort by; the same column again turns the order around", choices)
        self._order = order

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one(Lines).select_key(self._order.field.name)

    def sign_of(self, key: str) -> tuple[str, str]:
        return (f"{SORT_SIGNS[self._order.descending]} ", ACCENT) if key == self._order.field.name else ("  ", "")

    def on_input_submitted(self) -> None:
        if self.selected_key is not None:
            self.dismiss(self.selected_key)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.dismiss(event.key)


class ColumnsDialog(SearchDialog[list[str]]):
    """Choose columns and their order. Returns their keys from left to right."""

    # Fits into the dialog in a terminal of 60 columns.
    HINT = "space select  ⇧←→ move  ^r reset  enter ok  esc back"

    def __init__(self, choices: Sequence[ColumnChoice], chosen: Sequence[str], defaults: Sequence[str]) -> None:
        super().__init__("Columns from left to right", choices)
        self._chosen, self._defaults = list(chosen), list(defaults)

    def sign_of(self, key: str) -> tuple[str, str]:
        if key not in self._chosen:
            return "   ", ""
        return pad(str(self._chosen.index(key) + 1), 2, Align.RIGHT) + " ", ACCENT

    def on_input_submitted(self) -> None:
        self.dismiss(self._chosen)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self._turn()

    def consume_key(self, key: str) -> bool:
        match key:
            case "space":
                self._turn()
            case "shift+left" | "shift+right":
                self._shift(-1 if key == "shift+left" else 1)
            case "ctrl+r":
                self._chosen = list(self._defaults)
                self.update_rows()
            case _:
                return False
        return True

    def _turn(self) -> None:
        """Select the column under the cursor, or unselect it."""
        if (key := self.selected_key) is None:
            return
        if key in self._chosen:
            self._chosen.remove(key)
        else:
            self._chosen.append(key)
        self.update_rows()

    def _shift(self, places: int) -> None:
        """Move the column under the cursor to the left or to the right."""
        if (key := self.selected_key) not in self._chosen:
            return
        index = self._chosen.index(key)
        self._chosen.remove(key)
        self._chosen.insert(max(index + places, 0), key)
        self.update_rows()
