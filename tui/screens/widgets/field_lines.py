"""The lines of the form's list of fields, and those of the completions; `FieldList` puts them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.text import Text
from textual import events
from textual.widgets import Input

from engine.base.text import printable
from tui.form.fields import DEFAULT_CHOICE, Completion, ConfigField
from tui.screens.widgets.entry import INPUT_ACTIONS, TextEntry
from tui.screens.widgets.lines import KeyedRow, Lines
from tui.terminal.palette import ACCENT, BAD, CURSOR, MUTED, STRONG, WARNING

MARK_COLUMNS, LABEL_COLUMNS = 2, 18
VALUE_COLUMN = MARK_COLUMNS + LABEL_COLUMNS + 2
VALUE_COLUMNS = 18
# Where this many columns are left for notes, the fields without one have their summary there.
MIN_SUMMARY_COLUMNS = 40
MIN_ERROR_COLUMNS = 16
HEADING_PREFIX = "#"


@dataclass(frozen=True)
class FieldRow:
    """A field with its value. `note` is a fact about the value, `error` says what is wrong with it, `placeholder` is
    what an empty value stands for."""

    info: ConfigField
    text: str
    placeholder: str = ""
    note: str = ""
    error: str = ""
    changed: bool = False


@dataclass(frozen=True)
class Heading:
    """The title of the rows below it."""

    title: str


def field_line(row: FieldRow, width: int) -> Text:
    """Format a field as mark, label, value and note."""
    mark, style = ("✗ ", BAD) if row.error else ("• ", WARNING) if row.changed else ("  ", "")
    line = Text(mark, style, no_wrap=True, end="")
    line.append(row.info.label[:LABEL_COLUMNS].ljust(LABEL_COLUMNS), BAD if row.error else "")
    line.append("▾ " if row.info.choices else "  ", MUTED)
    empty = row.placeholder or (DEFAULT_CHOICE if row.info.choices else "")
    value = Text(
        printable(row.text) or empty, BAD if row.error else STRONG if row.changed else "" if row.text else MUTED
    )
    value.truncate(max(width - VALUE_COLUMN, 1), overflow="ellipsis")
    line.append_text(value)
    column = max(line.cell_len + 2, VALUE_COLUMN + VALUE_COLUMNS + 2)
    room = width - column
    note = printable(row.error or row.note or (row.info.summary if room >= MIN_SUMMARY_COLUMNS else ""))
    if note and room >= (MIN_ERROR_COLUMNS if row.error else len(note)):
        line.append(" " * (column - line.cell_len))
        line.append(note, BAD if row.error else MUTED)
    return line


def completion_line(completion: Completion, columns: int) -> Text:
    """Format a completion: its label in `columns`, and facts about it."""
    label = printable(completion.label).ljust(columns)
    return Text.assemble(label, (completion.detail, MUTED), no_wrap=True, end="")


def heading_line(heading: Heading, width: int) -> Text:
    """Format a heading as a rule with its title."""
    rule = "─" * max(width - len(heading.title) - 4, 0)
    return Text.assemble(("─ ", MUTED), (heading.title, ACCENT), (f" {rule}", MUTED), no_wrap=True, end="")


class FieldLines(Lines):
    """The lines of the fields. A click chooses; `FieldList` moves the cursor. `on_scroll` and `on_resized` are called
    when the lines in view have changed."""

    def __init__(self, on_scroll: Callable[[], None], on_resized: Callable[[], None]) -> None:
        super().__init__(selectable=True, focusable=False, id="field-lines")
        self._on_scroll, self._on_resized = on_scroll, on_resized
        self._shown: dict[str, FieldRow] = {}
        self._shown_width = 0

    def show_fields(self, rows: Sequence[FieldRow | Heading], header: Sequence[Text], empty_text: Text) -> None:
        """Replace the rows. A line is formatted again only if its row or the width has changed, which takes longer than
        to compare them."""
        width = self.text_width
        known = {row.key: row for row in self._rows} if width == self._shown_width else {}
        lines = []
        for row in rows:
            if isinstance(row, Heading):
                lines.append(KeyedRow(HEADING_PREFIX + row.title, heading_line(row, width)))
            else:
                key = row.info.key
                same = key in known and self._shown.get(key) == row
                lines.append(known[key] if same else KeyedRow(key, field_line(row, width)))
        self._shown = {row.info.key: row for row in rows if isinstance(row, FieldRow)}
        self._shown_width = width
        self.set_rows(lines, header, empty_text)

    def visible_keys(self) -> list[str]:
        """Return the keys of the rows in view."""
        top = int(self.scroll_offset.y)
        return [row.key for row in self._rows[top : top + max(self.size.height - len(self._header), 0)]]

    def on_click(self, event: events.Click) -> None:
        event.prevent_default()
        index = self.index_at(event)
        if index is not None:
            self.post_message(self.Chosen(self, self._rows[index].key))

    def on_resize(self) -> None:
        super().on_resize()
        self._on_resized()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            self._on_scroll()


class CompletionLines(Lines):
    """The completions below the input. A click chooses."""

    @property
    def cursor_style(self) -> str:
        return CURSOR

    def show_completions(self, completions: Sequence[Completion], current: str) -> int:
        """Show the completions with the cursor on `current`, if it is among them. Return the width of the lines."""
        columns = max(len(completion.label) for completion in completions) + 2
        details = max(len(completion.detail) for completion in completions)
        # Of two hundred, only the lines in view are made.
        self.set_rows([KeyedRow(each.value, partial(completion_line, each, columns)) for each in completions])
        values = [completion.value for completion in completions]
        self.select_key(current if current in values else values[0])
        return columns + details

    def on_click(self, event: events.Click) -> None:
        event.prevent_default()
        event.stop()
        index = self.index_at(event)
        if index is not None:
            self._move_to(index)
            self.action_choose()


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
