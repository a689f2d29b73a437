"""A line of styled text that is redrawn only if it changes, and follows the theme."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip
from textual.widget import Widget


def draw_line(text: Text, console: Console, base: Style, width: int, cursor: Style | None = None) -> Strip:
    """Return a text in exactly `width` cells. The style names of its parts are those of the theme of `console`.

    `base` is the style of the widget, and `cursor` that of the cursor if the line is under it.
    """
    if cursor is not None:
        base += cursor
    if text.style:
        # Rich omits it if the text has no other style.
        base += console.get_style(text.style)
    if (room := width - text.cell_len) < 0:
        text = text.copy()
        text.truncate(width, overflow="ellipsis")
    parts = _parts(text, console)
    if cursor is not None and base.reverse:
        # Reversed, a color would fill its cells, blanks of graphs included, and dim text would be hard to read.
        plain, colored = Style(reverse=True, dim=False), Style(reverse=False)
        parts = [(part, style and style + (colored if style.color else plain)) for part, style in parts]
    segments = [Segment(part, base + style if style else base) for part, style in parts]
    return Strip([*segments, Segment(" " * room, base)] if room > 0 else segments, width)


def _parts(text: Text, console: Console) -> list[tuple[str, Style | None]]:
    """Return the parts of a text with their styles."""
    plain, get_style, position = text.plain, console.get_style, 0
    parts: list[tuple[str, Style | None]] = []
    for start, end, style in text.spans:
        if start < position or text.style:
            # Styles on top of each other.
            return [(part, style) for part, style, _ in text.render(console) if part]
        # Rich sorts and sums up the styles of any text, which makes a line twice as slow.
        if start > position:
            parts.append((plain[position:start], None))
        if end > start:
            parts.append((plain[start:end], get_style(style)))
        position = end
    if position < len(plain):
        parts.append((plain[position:], None))
    return parts


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

    def show_lines(self, lines: Sequence[Text]) -> None:
        """Show lines one below the other, or hide the widget without any."""
        self.display, self.styles.height = bool(lines), max(len(lines), 1)
        # A single line is drawn without Textual's own kind of text.
        self.show(lines[0] if len(lines) == 1 else Text("\n", end="").join(lines))

    def render(self) -> Text:
        return self.text

    def render_line(self, y: int) -> Strip:
        if self.size.height > 1:
            return super().render_line(y)
        # Textual would convert the text to its own kind and wrap it with each refresh.
        return draw_line(self.text, self.app.console, self.visual_style.rich_style, self.size.width)
