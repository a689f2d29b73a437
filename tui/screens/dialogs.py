"""Small windows over a screen: a choice, a question for text, something to read."""

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
from tui.text.palette import BAD, MUTED, STRONG
from tui.widgets.entry import Entry
from tui.widgets.lines import Lines, Row


class ChoiceDialog(ModalScreen[str | None]):
    """One of several rows, by its key; None where it was left with escape."""

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
            yield Static("enter choose   esc back", classes="hint")

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
    """Answered with `yes`; what comes first changes nothing."""
    return ChoiceDialog(question, [Row("no", Text("go on training")), Row("yes", Text("stop"))])


class MultiChoiceDialog(ModalScreen[list[str] | None]):
    """Any number of rows, by their keys; None where it was left with escape."""

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
            yield Static("space pick   enter done   esc back", classes="hint")

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
    """A line of text; None where it was left with escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]

    def __init__(self, title: str, value: str, note: str) -> None:
        super().__init__()
        self._title, self._value, self._note = title, value, note

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = self._title
            yield Static(self._note, classes="note", markup=False)
            yield Entry(self._value)
            yield Static("enter done   esc back", classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)

    def action_leave(self) -> None:
        self.dismiss(None)


class TextDialog(ModalScreen[None]):
    """Lines to read and scroll."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "leave", show=False),
        Binding("ctrl+y", "copy", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Text]) -> None:
        super().__init__()
        self._title, self._lines = title, list(lines)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide") as box:
            box.border_title = self._title
            yield Lines()
            yield Static("esc back   ^y copy", classes="hint")

    def on_mount(self) -> None:
        self.query_one(Lines).focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._update_lines)

    def _update_lines(self) -> None:
        lines = self.query_one(Lines)
        wrapped = [part for line in self._lines for part in line.wrap(self.app.console, max(lines.size.width, 20))]
        lines.styles.height = len(wrapped)
        lines.set_texts(wrapped)

    def action_copy(self) -> None:
        self.app.copy_to_clipboard("\n".join(line.plain for line in self._lines))
        self.app.notify("copied")

    def action_leave(self) -> None:
        self.dismiss(None)


def help_lines(commands: Sequence[Command]) -> list[Text]:
    width = max(len(command.key_label) for command in commands)
    titles = max(len(command.title) for command in commands)
    return [
        Text.assemble(
            (command.key_label.rjust(width), STRONG), "  ", command.title.ljust(titles), "  ", (command.help, MUTED)
        )
        for command in commands
    ]


def problem_lines(problems: Sequence[tuple[str, str]]) -> list[Text]:
    """What is wrong: where, and what."""
    found: list[Text] = []
    for where, what in problems:
        found += [Text(where, BAD), Text(f"  {what}")] if where else [Text(what)]
    return found
