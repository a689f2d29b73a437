"""A chart: its curves, told apart by their marker and their name, in a panel whose title reads their values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from tui.charts.axis import short_number
from tui.charts.plot import Curve, Plot, Window, plot
from tui.text.tables import NONE
from tui.widgets.lines import Lines

SIGNS = {"braille": "⣀"}
CURSOR = "│"
# The axis and its labels, below what is drawn.
FOOT_LINES = 2


class Chart(Lines):
    """Draws when it is told to. The frame's title shows the values at the cursor, or else the latest ones."""

    def __init__(self, title: str, id: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._title = title
        self._plot = Plot([])
        self._place: float | None = None
        self._note = ""
        self.curves: list[Curve] = []
        self.window = Window(0.0, 1.0)

    def draw(self, curves: Sequence[Curve], window: Window, note: str = "", cursor: float | None = None) -> None:
        self.curves, self.window = list(curves), window
        self._redraw()
        self.point(cursor, note)

    def point(self, cursor: float | None, note: str) -> None:
        """Put the cursor at this place of the x axis, without drawing the curves again."""
        self._place, self._note = cursor, note
        self.retitle(self._legend(), note)
        self._show()

    def _redraw(self) -> None:
        if self.size.width > 0:
            self._plot = plot(self.curves, self.window, self.size.width, self.size.height)

    def _show(self) -> None:
        self.show_texts(self._with_cursor(self._plot))

    def _with_cursor(self, drawn: Plot) -> list[Text]:
        low, high = self.window.low, self.window.high
        if self._place is None or not drawn.across or not low <= self._place <= high:
            return drawn.lines
        column = drawn.left + round((self._place - low) / (high - low) * (drawn.across - 1))
        crossed = [_replaced(line, column) for line in drawn.lines[:-FOOT_LINES]]
        return crossed + drawn.lines[-FOOT_LINES:]

    def on_resize(self) -> None:
        self._redraw()
        self._show()

    def _legend(self) -> str:
        """Read as markup by the frame; nothing in it comes from outside."""
        words = [self._title]
        for curve in self.curves:
            value = curve.series.latest() if self._place is None else curve.series.at(self._place)
            shown = NONE if value is None else short_number(value, 3)
            words.append(f"{SIGNS.get(curve.marker, curve.marker)}{curve.label} {shown}")
        return "  ".join(words)


def _replaced(line: Text, column: int) -> Text:
    """The line with the cursor in this column."""
    first, _, last = line.divide([column, column + 1]) if column < len(line) else (line, None, Text(""))
    return Text.assemble(first, (CURSOR, "bold"), last, no_wrap=True, end="")
