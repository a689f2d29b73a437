"""The chart widget: curves drawn by `tui.charts.plot` in a panel whose title is the legend with current values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from engine.runs.series import Series
from engine.utils.ticks import format_number
from tui.charts.plot import Curve, Plot, PlotWindow, plot
from tui.palette import theme_variable
from tui.text.tables import UNKNOWN
from tui.widgets.lines import Lines

MARKER_SYMBOLS = {"braille": "─", "dashed": "╌"}
CURSOR_CHARACTER = "│"
# Columns of the frame and of the blanks around a title, within the width of the content.
TITLE_MARGIN = 4
# Decimals of the values and gaps between them, from the best to the shortest legend.
LEGEND_FORMATS = ((4, "  "), (4, " "), (3, "  "), (3, " "), (2, " "))


class Chart(Lines):
    """A panel of curves with an optional cursor. The title shows the values at the cursor, or the latest values."""

    def __init__(self, title: str, id: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._title = title
        self._plot = Plot([])
        self._cursor_x: float | None = None
        self._note_text = self._best = ""
        self.curves: list[Curve] = []
        self.window = PlotWindow(0.0, 1.0)

    def draw(
        self,
        curves: Sequence[Curve],
        window: PlotWindow,
        note: str = "",
        cursor: float | None = None,
        best: str = "",
    ) -> None:
        """Draw the curves within `window`. `note` is the panel's subtitle, `cursor` a position on the x axis, and
        `best` describes the best epoch in the title, or in the subtitle if the title has no room for it."""
        self.curves, self.window, self._best = list(curves), window, best
        self._redraw()
        self.set_cursor(cursor, note)

    def set_cursor(self, cursor: float | None, note: str) -> None:
        """Move the cursor to a position on the x axis, or hide it with None, without plotting the curves again."""
        self._cursor_x, self._note_text = cursor, note
        self._update_titles()
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
        rows = len(plotted.lines) - plotted.axis_lines
        return [_draw_cursor(line, column) for line in plotted.lines[:rows]] + plotted.lines[rows:]

    def on_resize(self) -> None:
        self._redraw()
        self._update_titles()
        self._update_lines()

    def _update_titles(self) -> None:
        """Show the legend: marker, label and value of each curve in its color, with the digits that fit."""
        for decimals, gap in LEGEND_FORMATS:
            parts = [self._legend_part(curve, decimals) for curve in self.curves]
            columns = len(gap.join(filter(None, [self._title, *parts]))) + TITLE_MARGIN
            if columns <= self.size.width:
                break
        in_title = columns + len(f"  {self._best}") <= self.size.width
        pairs = zip(self.curves, parts, strict=True)
        legend = [f"[{theme_variable(curve.style)}]{part}[/]" for curve, part in pairs if part]
        self.set_titles(
            gap.join(filter(None, [self._title, *legend, self._best if in_title else ""])),
            "  ".join(filter(None, ["" if in_title else self._best, self._note_text])),
        )

    def _legend_part(self, curve: Curve, decimals: int) -> str:
        value, reference = curve_value(curve, self._cursor_x)
        text = UNKNOWN if value is None else format_value(value, decimals)
        if reference is not None and value is not None:
            text = format_difference(value - reference, decimals)
        parts = (curve.mark, text) if curve.mark else (MARKER_SYMBOLS.get(curve.marker, ""), curve.label, text)
        return " ".join(filter(None, parts))


def curve_value(curve: Curve, x: float | None) -> tuple[float | None, float | None]:
    """Return the values of a curve and of its reference at `x`, or the latest ones; None if unknown or without one."""
    return _value(curve.values, x), None if curve.reference is None else _value(curve.reference, x)


def _value(series: Series, x: float | None) -> float | None:
    if x is None:
        return series.latest()
    # A curve that ends before `x` by more than the distance of its points has no value there.
    past = len(series.x) > 1 and x - series.x[-1] > series.x[-1] - series.x[-2]
    return None if past else series.value_at(x)


def format_difference(difference: float, decimals: int) -> str:
    """Format a difference with its sign."""
    return ("-" if difference < 0 else "+") + format_value(abs(difference), decimals)


def format_value(value: float, decimals: int) -> str:
    """Format a value of a curve with `decimals` decimals, or with three digits if it is small or large."""
    return f"{value:.{decimals}f}" if 0.01 <= abs(value) < 100 else format_number(value, 3)


def _draw_cursor(line: Text, column: int) -> Text:
    """Return the line with the cursor character at `column`."""
    first, _, last = line.divide([column, column + 1]) if column < len(line) else (line, None, Text(""))
    return Text.assemble(first, (CURSOR_CHARACTER, "bold"), last, no_wrap=True, end="")
