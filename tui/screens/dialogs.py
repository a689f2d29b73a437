"""Modal dialogs: choose one row, choose several rows, enter text, read text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from tui.keymap import Command
from tui.palette import BAD, MUTED, STRONG
from tui.widgets.entry import Entry
from tui.widgets.lines import Lines, Row


class ChoiceDialog(ModalScreen[str | None]):
    """Choose one of several rows. Returns the row's key, or None if canceled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "leave", show=False)]

    def __init__(self, title: str, rows: Sequence[Row], note: str = "") -> None:
        super().__init__()
        self._title, self._rows, self._note = title, list(rows), note

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = Text(self._title).plain.replace("[", "\\[")
            if self._note:
                yield Static(self._note, classes="note", markup=False)
            yield Lines(selectable=True)
            yield Static("enter choose   esc cancel", classes="hint")

    def on_mount(self) -> None:
        lines = self.query_one(Lines)
        lines.styles.height = min(len(self._rows), 16)
        lines.set_rows(self._rows)
        lines.focus()

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.dismiss(event.key)

    def action_leave(self) -> None:
        self.dismiss(None)


def stop_dialog(question: str) -> ChoiceDialog:
    """Ask whether to stop a run. Returns "yes" or "no"; "no" is first, so a stray enter stops nothing."""
    return ChoiceDialog(question, [Row("no", Text("Keep it running")), Row("yes", Text("Stop"))])


class MultiChoiceDialog(ModalScreen[list[str] | None]):
    """Choose any number of rows. Returns their keys, or None if canceled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", show=False),
        Binding("space", "turn", show=False),
    ]

    def __init__(self, title: str, rows: Sequence[Row], selected: Sequence[str]) -> None:
        super().__init__()
        self._title, self._rows, self._selected = title, list(rows), set(selected)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = self._title
            yield Lines(selectable=True)
            yield Static("space select   enter confirm   esc cancel", classes="hint")

    def on_mount(self) -> None:
        self.query_one(Lines).styles.height = min(len(self._rows), 16)
        self._update_rows()
        self.query_one(Lines).focus()

    def _update_rows(self) -> None:
        marks = {True: Text("[x] ", STRONG), False: Text("[ ] ")}
        self.query_one(Lines).set_rows(
            [Row(row.key, marks[row.key in self._selected] + row.text) for row in self._rows]
        )

    def action_turn(self) -> None:
        if (key := self.query_one(Lines).selected_key) is not None:
            self._selected ^= {key}
            self._update_rows()

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.dismiss([row.key for row in self._rows if row.key in self._selected])

    def action_leave(self) -> None:
        self.dismiss(None)


class TextInputDialog(ModalScreen[str | None]):
    """Enter a line of text. Returns it stripped, or None if empty or canceled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]

    def __init__(self, title: str, value: str, note: str) -> None:
        super().__init__()
        self._title, self._value, self._note = title, value, note

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = self._title
            yield Static(self._note, classes="note", markup=False)
            yield Entry(self._value)
            yield Static("enter confirm   esc cancel", classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)

    def action_leave(self) -> None:
        self.dismiss(None)


class TextDialog(ModalScreen[None]):
    """Read and copy lines of text, wrapped to the dialog's width. `at_end` opens it at the last line."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "leave", show=False),
        Binding("ctrl+y", "copy", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Text], *, at_end: bool = False) -> None:
        super().__init__()
        self._title, self._lines, self._at_end = title, list(lines), at_end

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide") as box:
            box.border_title = self._title
            yield Lines()
            yield Static("esc close   ^y copy", classes="hint")

    def on_mount(self) -> None:
        self.query_one(Lines).focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._update_lines)

    def _update_lines(self) -> None:
        lines = self.query_one(Lines)
        wrapped = [part for line in self._lines for part in line.wrap(self.app.console, max(lines.text_width, 20))]
        lines.styles.height = len(wrapped)
        lines.set_texts(wrapped)
        if self._at_end:
            lines.scroll_end(animate=False)

    def action_copy(self) -> None:
        self.app.copy_to_clipboard("\n".join(line.plain for line in self._lines))
        self.app.notify("Copied to the clipboard")

    def action_leave(self) -> None:
        self.dismiss(None)


def help_lines(commands: Sequence[Command]) -> list[Text]:
    """Return one aligned line per command: key, title, help."""
    width = max(len(command.key_label) for command in commands)
    titles = max(len(command.title) for command in commands)
    return [
        Text.assemble(
            (command.key_label.rjust(width), STRONG), "  ", command.title.ljust(titles), "  ", (command.help, MUTED)
        )
        for command in commands
    ]


def problem_lines(problems: Sequence[tuple[str, str]]) -> list[Text]:
    """Format (location, message) pairs; the message follows its location on an indented line."""
    lines: list[Text] = []
    for location, message in problems:
        lines += [Text(location, BAD), Text(f"  {message}")] if location else [Text(message)]
    return lines
