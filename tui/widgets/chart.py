"""A chart: its curves, told apart by their marker and their name, in a panel whose title reads their values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from tui.charts.axis import format_number
from tui.charts.plot import Curve, Plot, PlotWindow, plot
from tui.text.tables import UNKNOWN
from tui.widgets.lines import Lines

MARKER_SYMBOLS = {"braille": "⣀"}
CURSOR_CHARACTER = "│"
# The axis and its labels, below what is drawn.
X_AXIS_LINES = 2


class Chart(Lines):
    """Draws when it is told to. The frame's title shows the values at the cursor, or else the latest ones."""

    def __init__(self, title: str, id: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._title = title
        self._plot = Plot([])
        self._cursor_x: float | None = None
        self._note_text = ""
        self.curves: list[Curve] = []
        self.window = PlotWindow(0.0, 1.0)

    def draw(self, curves: Sequence[Curve], window: PlotWindow, note: str = "", cursor: float | None = None) -> None:
        self.curves, self.window = list(curves), window
        self._redraw()
        self.set_cursor(cursor, note)

    def set_cursor(self, cursor: float | None, note: str) -> None:
        """Put the cursor at this place of the x axis, without drawing the curves again."""
        self._cursor_x, self._note_text = cursor, note
        self.set_titles(self._legend(), note)
        self._update_lines()

    def _redraw(self) -> None:
        if self.size.width > 0:
            self._plot = plot(self.curves, self.window, self.size.width, self.size.height)

    def _update_lines(self) -> None:
        self.set_texts(self._with_cursor(self._plot))

    def _with_cursor(self, plotted: Plot) -> list[Text]:
        low, high = self.window.low, self.window.high
        if self._cursor_x is None or not plotted.area_width or not low <= self._cursor_x <= high:
            return plotted.lines
        column = plotted.area_left + round((self._cursor_x - low) / (high - low) * (plotted.area_width - 1))
        crossed = [_draw_cursor(line, column) for line in plotted.lines[:-X_AXIS_LINES]]
        return crossed + plotted.lines[-X_AXIS_LINES:]

    def on_resize(self) -> None:
        self._redraw()
        self._update_lines()

    def _legend(self) -> str:
        """Read as markup by the frame; nothing in it comes from outside."""
        words = [self._title]
        for curve in self.curves:
            value = curve.series.latest() if self._cursor_x is None else curve.series.value_at(self._cursor_x)
            shown = UNKNOWN if value is None else format_number(value, 3)
            words.append(f"{MARKER_SYMBOLS.get(curve.marker, curve.marker)}{curve.label} {shown}")
        return "  ".join(words)


def _draw_cursor(line: Text, column: int) -> Text:
    """The line with the cursor in this column."""
    first, _, last = line.divide([column, column + 1]) if column < len(line) else (line, None, Text(""))
    return Text.assemble(first, (CURSOR_CHARACTER, "bold"), last, no_wrap=True, end="")
