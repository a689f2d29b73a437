"""The fields of the form: one scrolling list of lines, one input over the line under the cursor, and its completions.

A widget per field would be slow, because Textual styles and lays out each of them. The input keeps the focus and
handles every key itself, so keys that arrive together reach the field that they were typed for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.geometry import Size
from textual.message import Message

from engine.base.text import printable
from tui.form.fields import BOOLEAN_CHOICES, ConfigField, completions
from tui.screens.widgets.field_lines import (
    LABEL_COLUMNS,
    VALUE_COLUMN,
    VALUE_COLUMNS,
    CompletionLines,
    FieldEntry,
    FieldLines,
    FieldRow,
    Heading,
)
from tui.screens.widgets.lines import Lines
from tui.terminal.palette import ACCENT, MUTED

MAX_COMPLETION_ROWS, MIN_COMPLETION_COLUMNS = 10, 16
MOVES = {"down": 1, "tab": 1, "up": -1, "shift+tab": -1}
PAGES = {"pagedown": 1, "pageup": -1}


class FieldList(Container):
    """A list of fields with headings. `on_edit` receives the key and the text of a field that the user changed;
    `on_search` is called when `query_text` changes. Both update the rows before the next key is handled."""

    class Selected(Message):
        """The cursor moved to a field."""

    class Activated(Message):
        """The user pressed enter on a field that is chosen in a dialog."""

    def __init__(
        self,
        on_edit: Callable[[str, str], None],
        on_search: Callable[[], None],
        dialog_keys: Callable[[], Sequence[str]],
    ) -> None:
        super().__init__(id="fields")
        self._on_edit, self._on_search = on_edit, on_search
        self._dialog_keys = dialog_keys
        self._rows: dict[str, FieldRow] = {}
        self._order: list[str] = []
        self._key = self._shown_text = ""
        """Text of the current row when the input showed it last."""
        self._completions_size = Size(0, 0)
        """Columns and rows of all completions."""
        self._query: str | None = None
        self.searching = False

    def compose(self) -> ComposeResult:
        yield FieldLines(self._follow_scroll, self._follow_resize)
        yield FieldEntry(self.consume_key, self.handle_typing, self.open_if_fixed)
        yield CompletionLines(selectable=True, focusable=False, id="completions")

    def on_mount(self) -> None:
        self._completions.display = False

    @property
    def _lines(self) -> FieldLines:
        return self.query_one(FieldLines)

    @property
    def _entry(self) -> FieldEntry:
        return self.query_one(FieldEntry)

    @property
    def _completions(self) -> CompletionLines:
        return self.query_one(CompletionLines)

    @property
    def is_open(self) -> bool:
        """Whether the completions are shown."""
        return self._completions.display

    @property
    def query_text(self) -> str:
        """The text to search for; empty without a search."""
        return self._query or ""

    @property
    def selected(self) -> ConfigField | None:
        """The field under the cursor."""
        row = self._rows.get(self._key)
        return None if row is None or self.searching else row.info

    def set_title(self, title: str) -> None:
        self._lines.set_titles(title)

    def show(self, rows: Sequence[FieldRow | Heading]) -> None:
        """Replace the rows. The cursor stays on its field, or moves to the nearest one that is left."""
        before, index = self._order, self._order.index(self._key) if self._key in self._order else 0
        self._rows = {row.info.key: row for row in rows if isinstance(row, FieldRow)}
        self._order = list(self._rows)
        empty = Text(f"No field contains {self.query_text!r}", MUTED)
        self._lines.show_fields(rows, self._search_header(), empty)
        if self.searching:
            # The best match is the first field. Escape returns to the field that was selected before.
            self._lines.select_key((self._order or [""])[0])
            self._lines.scroll_to(y=0, animate=False, force=True, immediate=True)
            self._place_entry()
        elif self._key not in self._rows:
            nearest = [key for key in (*before[index:], *reversed(before[:index])) if key in self._rows]
            self._go_to((nearest or self._order or [""])[0])
        elif not self._shown_text:
            # Emptied a moment ago, or empty: what that stands for is dimmed.
            row = self._rows[self._key]
            self._entry.placeholder = row.placeholder or row.text
            self._lines.select_key(self._key)
            self._place_entry()
        elif self._rows[self._key].text != self._shown_text:
            self._go_to(self._key)
        else:
            self._lines.select_key(self._key)
            self._place_entry()

    def _search_header(self) -> list[Text]:
        if self._query is None:
            return []
        label = f"  {'search':<{LABEL_COLUMNS}}  "
        return [Text.assemble((label, ACCENT), "" if self.searching else printable(self._query))]

    def select(self, key: str) -> None:
        """Move the cursor to a field, and show its value in the input."""
        if key in self._rows:
            self._go_to(key)

    def _go_to(self, key: str) -> None:
        self.close()
        self._key = key
        row = self._rows.get(key)
        self._shown_text = "" if row is None else row.text
        self._lines.select_key(key)
        if not self.searching:
            entry = self._entry
            entry.placeholder = "" if row is None else row.placeholder
            entry.show(self._shown_text)
            self._place_entry()
        self.post_message(self.Selected())

    def _place_entry(self) -> None:
        """Move the input over the value under the cursor, or over the line to search in."""
        entry, lines = self._entry, self._lines
        room = max(lines.text_width - VALUE_COLUMN, 1)
        width = room if self.searching else min(max(VALUE_COLUMNS, len(self._shown_text) + 2), room)
        y = 0 if self.searching else lines.cursor_y
        # The lines have a frame.
        offset = (VALUE_COLUMN + 1, y + 1)
        if (entry.styles.offset.x.value, entry.styles.offset.y.value) != offset:
            entry.styles.offset = offset
        if entry.styles.width is None or entry.styles.width.value != width:
            entry.styles.width = width

    def _follow_scroll(self) -> None:
        """Keep the cursor in view when the list is scrolled."""
        if self.searching:
            return
        visible = [key for key in self._lines.visible_keys() if key in self._rows]
        if visible and self._key not in visible:
            above = self._order.index(self._key) < self._order.index(visible[0])
            self._go_to(visible[0] if above else visible[-1])
        else:
            self.close()
            self._place_entry()

    def _follow_resize(self) -> None:
        """Move the input and the completions with the line under the cursor."""
        self._place_entry()
        if self.is_open:
            self._place_completions()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._lines.scroll_relative(y=self.app.scroll_sensitivity_y, animate=False, immediate=True)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._lines.scroll_relative(y=-self.app.scroll_sensitivity_y, animate=False, immediate=True)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        event.stop()
        if event.lines is not self._lines:
            self._accept()
        elif event.key == self._key:
            self.open_if_fixed()
        elif event.key in self._rows:
            self.searching = False
            self._go_to(event.key)

    # Keys

    def consume_key(self, key: str) -> bool:
        """Handle a key before the input does. Return whether the key is handled."""
        if self.is_open and self._handle_completion_key(key):
            return True
        if key == "ctrl+f" or (key == "slash" and self.selected is not None and self.selected.is_fixed):
            self.start_search()
        elif key == "escape":
            return self._leave_search()
        elif self.searching:
            return self._handle_search_key(key)
        elif key in MOVES:
            self._move(MOVES[key])
        elif key in PAGES:
            self._move(PAGES[key] * max(self._lines.size.height - 2, 1))
        elif key in ("ctrl+home", "ctrl+end"):
            self._move(len(self._order) * (1 if key == "ctrl+end" else -1))
        elif key == "enter":
            self._activate()
        elif self.selected is not None and self.selected.is_fixed and key in ("space", "left", "right"):
            if key == "space" and self.selected.choices != BOOLEAN_CHOICES:
                self._open("")
            else:
                self._cycle(-1 if key == "left" else 1)
        else:
            return False
        return True

    def _handle_completion_key(self, key: str) -> bool:
        if key in ("down", "up"):
            self._completions.action_move(MOVES[key])
        elif key in PAGES:
            self._completions.action_page(PAGES[key])
        elif key == "enter":
            self._accept()
        elif key == "escape":
            self.close()
            self._entry.show(self._shown_text)
        elif key in ("tab", "shift+tab"):
            self._accept()
            self._move(MOVES[key])
        else:
            return False
        return True

    def _handle_search_key(self, key: str) -> bool:
        if key not in ("enter", "down", "tab"):
            return False
        if self._order:
            self.searching = False
            self._on_search()
            self._go_to(self._order[0])
        return True

    def start_search(self) -> None:
        """Move the input to the line to search in."""
        self.close()
        self.searching, self._query = True, self.query_text
        self._entry.placeholder = "part of a label, a key or a description"
        self._entry.show(self._query)
        self._on_search()
        self._place_entry()
        self.post_message(self.Selected())

    def _leave_search(self) -> bool:
        """Show all fields again. Return whether there was a search."""
        if self._query is None:
            return False
        self.searching, self._query = False, None
        self._on_search()
        self._go_to(self._key)
        return True

    def _move(self, rows: int) -> None:
        if self._key in self._order:
            index = min(max(self._order.index(self._key) + rows, 0), len(self._order) - 1)
            self._go_to(self._order[index])

    def _cycle(self, step: int) -> None:
        """Select the next choice of a field with fixed choices."""
        row = self._rows[self._key]
        choices = row.info.choices
        index = choices.index(row.text) if row.text in choices else -step
        self._edit(choices[(index + step) % len(choices)])
        self._entry.show(self._shown_text)

    def _activate(self) -> None:
        choices = self.selected.choices if self.selected is not None else ()
        # The input selects its text until the user types. What was typed in full is not chosen from a list.
        typed = self._entry.value if self._entry.selection.is_empty else ""
        if self._key in self._dialog_keys():
            self.post_message(self.Activated())
        elif choices and (not typed or typed not in choices):
            self._open("")
        else:
            self._move(1)

    def open_if_fixed(self) -> None:
        """Show the choices of the field under the cursor, if it accepts nothing else."""
        if self.selected is not None and self.selected.is_fixed and not self.is_open:
            self._open("")

    def handle_typing(self, text: str) -> None:
        """Take over what the user typed into the input."""
        if self.searching:
            self._query = text
            self._on_search()
            return
        info = self.selected
        if info is None:
            return
        if not info.is_fixed or text in info.choices:
            self._edit(text)
        self._open(text)

    def _edit(self, text: str) -> None:
        self._shown_text = text
        self._on_edit(self._key, text)

    # Completions

    def _open(self, text: str) -> None:
        """Show the completions of `text`, or close them if there are none besides the text."""
        info = self.selected
        found = [] if info is None else completions(info, text)
        if info is None or not found or [completion.value for completion in found] == [text]:
            self.close()
            return
        current = found[0].value if text else self._shown_text
        width = self._completions.show_completions(found, current)
        self._completions_size = Size(max(width, MIN_COMPLETION_COLUMNS), len(found))
        self._place_completions()

    def _place_completions(self) -> None:
        """Put the completions below the input, or above it where there is more room."""
        completions, total = self._completions, self.size.height
        width, rows = self._completions_size
        y = self._lines.cursor_y + 2
        below, above = total - y, y - 1
        up = below < min(rows, MAX_COMPLETION_ROWS) + 2 and above > below
        height = min(rows + 2, MAX_COMPLETION_ROWS + 2, above if up else below)
        # The frame and the scrollbar take three columns. Wide completions begin further to the left.
        width = min(width + 3, self.size.width)
        x = min(VALUE_COLUMN, self.size.width - width)
        completions.styles.offset = (x, y - 1 - height if up else y)
        completions.styles.width, completions.styles.height = width, height
        completions.display = True

    def close(self) -> None:
        """Hide the completions."""
        self._completions.display = False

    def _accept(self) -> None:
        value = self._completions.selected_key
        self.close()
        if value is not None:
            if value != self._rows[self._key].text:
                self._edit(value)
            self._entry.show(self._shown_text)
