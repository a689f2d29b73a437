"""A line of styled text that is redrawn only if it changes, and follows the theme."""

from __future__ import annotations

from rich.text import Text
from textual.strip import Strip
from textual.widget import Widget

from tui.widgets.drawing import draw_line


class TextLine(Widget):
    """One line of `Text`, or several if its style sheet makes it higher. A `Static` would keep the colors of the theme
    in which it was set."""

    DEFAULT_CSS = """
    TextLine {
        height: 1;
        width: 100%;
    }
    """

    def __init__(self, text: Text | None = None, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id, classes=classes)
        self.text = text or Text("")

    def show(self, text: Text) -> None:
        """Show another text."""
        if text != self.text or text.style != self.text.style:
            self.text = text
            self.refresh()

    def render(self) -> Text:
        return self.text

    def render_line(self, y: int) -> Strip:
        if self.size.height > 1:
            return super().render_line(y)
        # Textual would convert the text to its own kind and wrap it with each refresh.
        return draw_line(self.text, self.app.console, self.visual_style.rich_style, self.size.width)
