"""The lines of a panel within its frame; `tui.widgets.lines` draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual._styles_cache import StylesCache
from textual.color import Color
from textual.css.styles import StylesBase
from textual.geometry import Size, Spacing
from textual.strip import Strip


class FramedLines(StylesCache):
    """Puts the frame of a panel around its lines.

    Its sides are the same cells beside each line. Textual 8.2 looks up the styles of the widget for each line anew: a
    third of the time that it takes to draw a moved cursor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sides: tuple[Segment, Segment] | None = None
        self._framed: dict[int, tuple[Strip, Strip]] = {}
        """Each line without and with its sides. Textual keeps the colors and parts of a strip with it."""

    def clear(self) -> None:
        """Forget all lines, after a change of the widget or its styles."""
        super().clear()
        self._sides = None
        self._framed.clear()

    def render_line(
        self,
        styles: StylesBase,
        y: int,
        size: Size,
        content_size: Size,
        padding: Spacing,
        base_background: Color,
        background: Color,
        render_content_line: Callable[[int], Strip],
        *more: Any,
    ) -> Strip:
        """Return line `y` of the widget, its frame included."""
        is_inside = 0 < y < size.height - 1
        if self._sides is not None and is_inside:
            (left, right), line, known = self._sides, render_content_line(y - 1), self._framed.get(y)
            if known is None or known[0] is not line:
                inner = line.adjust_cell_length(content_size.width, Style.from_color(bgcolor=background.rich_color))
                framed = Strip([left, *inner, right], size.width)
                known = self._framed[y] = line, framed
            return known[1]
        strip = super().render_line(
            styles, y, size, content_size, padding, base_background, background, render_content_line, *more
        )
        if is_inside and size == Size(content_size.width + 2, content_size.height + 2):
            segments = list(strip)
            self._sides = segments[0], segments[-1]
        return strip
