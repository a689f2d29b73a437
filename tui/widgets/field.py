"""One field of the form: config key, input or select, description and error. `tui.form.model` describes the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Input, Select, Static

from engine.utils.text import printable
from tui.form.model import ConfigField
from tui.widgets.entry import Entry

BOOLEAN_CHOICES = ("false", "true")
OTHER_CHOICE = "other …"


class Chooser(Select[str], inherit_bindings=False):
    """A select that opens on enter or space only; the form uses the arrow keys to move between fields."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "show_overlay", show=False)]


def select_options(choices: Sequence[str]) -> list[tuple[Text, str]]:
    """Return the options of a select as `Text`, because Textual parses plain strings as markup."""
    return [(Text(printable(choice)), choice) for choice in choices]


class Field(Vertical):
    """A form row for one config key. Posts `Typed` on every change by the user."""

    class Typed(Message):
        """The user changed the value."""

        def __init__(self, key: str, text: str) -> None:
            super().__init__()
            self.key, self.text = key, text

    class Other(Message):
        """The user chose to enter a value that is not among the choices."""

        def __init__(self, info: ConfigField) -> None:
            super().__init__()
            self.info = info

    class Entered(Message):
        """The user pressed enter in a text input."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self, info: ConfigField, text: str) -> None:
        super().__init__(id=f"field-{info.key.replace('.', '-')}")
        self.info = info
        self._text = text
        self._choices = (
            BOOLEAN_CHOICES if info.is_boolean else (*info.choices, OTHER_CHOICE) if info.allows_other else info.choices
        )

    def compose(self) -> ComposeResult:
        with Horizontal(classes="line"):
            yield Static(self.info.key, classes="key", markup=False)
            if self._choices:
                yield Chooser(
                    select_options(self._choices_with(self._text)), value=self._text, allow_blank=False, compact=True
                )
            else:
                yield Entry(self._text)
            yield Static(self.info.description, classes="description", markup=False)
        yield Static("", classes="error", markup=False)

    def _choices_with(self, text: str) -> tuple[str, ...]:
        """Return the choices. If `text` is not one of them, it is inserted before "other …"."""
        if text in self._choices:
            return tuple(self._choices)
        fixed = [choice for choice in self._choices if choice != OTHER_CHOICE]
        return (*fixed, text, *self._choices[len(fixed) :])

    @property
    def control(self) -> Any:
        return self.query_one(Chooser if self._choices else Input)

    def set_value(self, text: str) -> None:
        """Set the value without posting `Typed`."""
        if text == self._text:
            return
        self._text = text
        if self._choices and text not in self._choices:
            self.control.set_options(select_options(self._choices_with(text)))
        self.control.value = text

    def set_placeholder(self, text: str) -> None:
        """Show the default that an empty text input stands for."""
        if not self._choices:
            self.control.placeholder = text

    def show_error(self, error: str) -> None:
        """Show an error below the field; an empty string clears it."""
        self.set_class(bool(error), "-wrong")
        line = self.query_one(".error", Static)
        line.update(f"✗ {error}" if error else "")
        line.display = bool(error)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._post_change(event.value)

    def on_select_changed(self, event: Select.Changed) -> None:
        event.stop()
        if event.value == OTHER_CHOICE:
            self.control.value = self._text
            self.post_message(self.Other(self.info))
        else:
            self._post_change(str(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Entered(self.info.key))

    def _post_change(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self.post_message(self.Typed(self.info.key, text))
