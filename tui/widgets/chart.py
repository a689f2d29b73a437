"""A chart: its curves, told apart by their marker and their name, in a panel whose title reads their values."""

from __future__ import annotations

from collections.abc import Sequence

from tui.axis import short_number
from tui.plot import Curve, Window, plot
from tui.widgets.lines import Lines

SIGNS = {"braille": "⣀"}


class Chart(Lines):
    """Draws when it is told to. The frame's title shows the values at the cursor, or else the latest ones."""

    def __init__(self, title: str, id: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._title = title
        self.curves: list[Curve] = []
        self.window = Window(0.0, 1.0)

    def draw(self, curves: Sequence[Curve], window: Window, note: str = "") -> None:
        self.curves, self.window = list(curves), window
        self.border_title = self._legend()
        self.border_subtitle = note or None
        self.redraw()

    def redraw(self) -> None:
        if self.size.width > 0:
            self.show_texts(plot(self.curves, self.window, self.size.width, self.size.height))

    def on_resize(self) -> None:
        super().on_resize()
        self.redraw()

    def _legend(self) -> str:
        """Read as markup by the frame; nothing in it comes from outside."""
        words = [self._title]
        for curve in self.curves:
            cursor = self.window.cursor
            value = curve.series.at(cursor) if cursor is not None else curve.series.latest()
            shown = "–" if value is None else short_number(value, 3)
            words.append(f"{SIGNS.get(curve.marker, curve.marker)}{curve.label} {shown}")
        return "  ".join(words)
