"""The panels beside the fields of the form: plan and command."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container
from textual.geometry import Size

from engine.utils.text import printable
from engine.utils.units import UNKNOWN
from tui.form.fields import ConfigField
from tui.palette import MUTED
from tui.widgets.text_line import TextLine


class SidebarBlock(TextLine):
    """A text as high as its lines. An invalid form keeps the height of the text before.

    A letter often makes a value wrong and the next one right. Each change of the height would lay out the whole screen.
    """

    def __init__(self, id: str, title: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self.border_title = title
        self._keeps_height = False
        self._shape = (0, 0)
        """Columns and rows of the text in the layout."""

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        columns, before = self._shape
        rows = self._rows_of_text(width)
        if self._keeps_height and width == columns:
            rows = max(rows, before)
        self._shape = (width, rows)
        return rows

    def _rows_of_text(self, width: int) -> int:
        return len(self.text.wrap(self.app.console, max(width, 1)))

    def show_text(self, text: Text, *, keep_height: bool) -> None:
        """Show another text. With `keep_height`, a shorter one leaves lines empty."""
        if text == self.text:
            return
        self.show(text)
        self._keeps_height = keep_height
        columns, rows = self._shape
        needed = self._rows_of_text(columns)
        if needed > rows or (needed < rows and not keep_height):
            self.refresh(layout=True)


class FormSidebar(Container):
    """Plan and command of the values in the form."""

    def __init__(self) -> None:
        super().__init__(id="sidebar")
        self._edited: ConfigField | None = None

    def compose(self) -> ComposeResult:
        for name, title in (("plan", "Plan"), ("command", "As a command")):
            yield SidebarBlock(name, title)

    def show_plan(self, text: Text, edited: ConfigField | None) -> None:
        """Show the plan; the panel does not become lower while the same field is edited."""
        self.query_one("#plan", SidebarBlock).show_text(text, keep_height=edited == self._edited)
        self._edited = edited

    def show_command(self, command: str | None) -> None:
        """Show the command of a valid config, None if it is invalid."""
        text = Text(UNKNOWN, MUTED) if command is None else Text(printable(command))
        self.query_one("#command", SidebarBlock).show_text(text, keep_height=command is None)
