"""One field of the form: the key, a control that fits it, what it is for, and what is wrong with it."""

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
    """A select that leaves the arrows to the form, to go from field to field."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "show_overlay", show=False)]


def select_options(choices: Sequence[str]) -> list[tuple[Text, str]]:
    """The options of a select: as text, because a plain string would be read as markup."""
    return [(Text(printable(word)), word) for word in choices]


class Field(Vertical):
    """`typed` is told with each change that a person makes."""

    class Typed(Message):
        def __init__(self, key: str, text: str) -> None:
            super().__init__()
            self.key, self.text = key, text

    class Other(Message):
        """Something that is none of the choices is wanted."""

        def __init__(self, info: ConfigField) -> None:
            super().__init__()
            self.info = info

    class Entered(Message):
        """Enter in a field of text."""

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
        """The words that can be chosen, this one among them."""
        if text in self._choices:
            return tuple(self._choices)
        own = [word for word in self._choices if word != OTHER_CHOICE]
        return (*own, text, *self._choices[len(own) :])

    @property
    def control(self) -> Any:
        return self.query_one(Chooser if self._choices else Input)

    def set_value(self, text: str) -> None:
        """Put this text into the control, where it is another."""
        if text == self._text:
            return
        self._text = text
        if self._choices and text not in self._choices:
            self.control.set_options(select_options(self._choices_with(text)))
        self.control.value = text

    def set_placeholder(self, text: str) -> None:
        """Show in an empty line what that stands for."""
        if not self._choices:
            self.control.placeholder = text

    def show_error(self, error: str) -> None:
        """Say what is wrong, or nothing."""
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
