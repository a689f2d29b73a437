"""The chart widget: curves drawn by `tui.charts.plot` in a panel whose title is the legend with current values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip

from engine.runs.series import Series
from engine.utils.units import UNKNOWN, format_number
from tui.charts.plot import Curve, Piece, Plot, PlotWindow, plot
from tui.palette import theme_variable
from tui.widgets.lines import Lines

MARKER_SYMBOLS = {"braille": "─", "dashed": "╌"}
CURSOR_CHARACTER, CURSOR_STYLE = "│", Style(bold=True)
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
        self._cursor_column: int | None = None
        self._strips: dict[int, tuple[object, Strip]] = {}
        """Each line without the cursor: what it was drawn with, and its cells."""
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
        """Move the cursor to a position on the x axis, or hide it with None. No curve is drawn."""
        self._cursor_x, self._note_text = cursor, note
        self._update_titles()
        self._move_cursor()

    def _redraw(self) -> None:
        if self.size.width > 0:
            before, self._plot = self._plot, plot(self.curves, self.window, self.size.width, self.size.height)
            for y, (old, new) in enumerate(zip_longest(before.rows, self._plot.rows, fillvalue=())):
                # The same cells can be split into other pieces.
                if old != new and (changed := _changed_columns(old, new)):
                    self.refresh(Region(changed[0], y, changed[-1] + 1 - changed[0], 1))

    def _move_cursor(self) -> None:
        """Redraw the columns that the cursor leaves and enters."""
        before, self._cursor_column = self._cursor_column, self._column_of_cursor()
        if self._cursor_column != before:
            columns = (column for column in (before, self._cursor_column) if column is not None)
            self.refresh(*(Region(column, 0, 1, self.size.height) for column in columns))

    def _column_of_cursor(self) -> int | None:
        """Return the column of the cursor; None if it is hidden or beyond the window."""
        low, high = self.window.low, self.window.high
        if self._cursor_x is None or not self._plot.area_width or not low <= self._cursor_x <= high:
            return None
        return self._plot.area_left + round((self._cursor_x - low) / (high - low) * (self._plot.area_width - 1))

    def render_line(self, y: int) -> Strip:
        strip, column = self._plain_line(y), self._cursor_column
        if column is None or y >= len(self._plot.rows) - self._plot.axis_lines:
            return strip
        return Strip(_replace_cell(strip, column, self._base_style + CURSOR_STYLE), strip.cell_length)

    def _plain_line(self, y: int) -> Strip:
        """Return a line without the cursor, which is kept until its text, its style or its width changes."""
        row = self._plot.rows[y] if y < len(self._plot.rows) else []
        base, width, known = self._base_style, self._line_width, self._strips.get(y)
        key = (row, base, width, self.app.theme)
        if known is None or known[0] != key:
            get_style = self.app.console.get_style
            segments = [Segment(text, base + get_style(style) if style else base) for text, style in row]
            # Only a message is shorter than the line.
            padding = segments[-1].style if segments else base
            known = self._strips[y] = (key, Strip(segments).adjust_cell_length(width, padding))
        return known[1]

    def on_resize(self) -> None:
        self._strips.clear()
        self._redraw()
        self._update_titles()
        self._move_cursor()

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


def _replace_cell(strip: Strip, column: int, style: Style) -> list[Segment]:
    """Return the segments of a line with the cursor at `column`. All characters of a plot are one cell wide.

    Dividing the strip and joining its parts takes three times as long.
    """
    segments, start = [], 0
    for segment in strip:
        offset, start = column - start, start + len(segment.text)
        if not 0 <= offset < len(segment.text):
            segments.append(segment)
            continue
        first, last = segment.text[:offset], segment.text[offset + 1 :]
        parts = [Segment(first, segment.style), Segment(CURSOR_CHARACTER, style), Segment(last, segment.style)]
        segments += [part for part in parts if part.text]
    return segments


def _changed_columns(old: Sequence[Piece], new: Sequence[Piece]) -> list[int]:
    """Return the columns of a line that change."""
    before, after = ([(character, style) for text, style in row for character in text] for row in (old, new))
    return [column for column, (a, b) in enumerate(zip_longest(before, after)) if a != b]
