"""The chart widget: curves drawn by `tui.charts.plot` in a panel whose title is the legend with current values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.strip import Strip

from engine.base.text import pluralize
from engine.base.units import UNKNOWN, format_number
from tui.charts.plot import POINT, STAR, Curve, Piece, Plot, PlotWindow, plot
from tui.screens.widgets.lines import Lines, escape_markup
from tui.terminal.palette import theme_variable

CURSOR_CHARACTER, CURSOR_STYLE = "│", Style(bold=True)
# Columns of the frame and of the blanks around a title, within the width of the content.
TITLE_MARGIN = 4
# Whether solid curves have a marker, too, and the gap between the curves, from the best to the shortest legend. The
# values have the digits of tables and log.
LEGEND_FORMATS = ((True, "  "), (True, " "), (False, " "))


class ChartPanel(Lines):
    """A panel of curves with an optional cursor. The title shows the values at the cursor, or the latest values."""

    ALLOW_SELECT = False
    # There is nothing to scroll.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pagedown,ctrl+d", "screen.page_charts(1)", show=False),
        Binding("pageup,ctrl+u", "screen.page_charts(-1)", show=False),
    ]

    def __init__(self, title: str, id: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._title = title
        self.has_legend = True
        """Whether the title has the values of the curves; else, a table beside the chart has them."""
        self.drawn_plot = Plot([])
        self._cursor_x: float | None = None
        self._cursor_column: int | None = None
        self._drawn_theme = ""
        self._strips: dict[int, tuple[object, Strip]] = {}
        """Each line without the cursor: what it was drawn with, and its cells."""
        self._cursor_strips: dict[int, tuple[Strip, object, Strip]] = {}
        """Each line with the cursor: the line without it, its column and look, and its cells."""
        self._note_text = self._best = ""
        self.curves: list[Curve] = []
        self.window = PlotWindow(0.0, 1.0)

    def rename(self, title: str) -> None:
        """Change what the legend begins with from the next drawing on."""
        self._title = title

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
            before, self.drawn_plot = self.drawn_plot, plot(self.curves, self.window, self.size.width, self.size.height)
            rows = enumerate(zip_longest(before.rows, self.drawn_plot.rows, fillvalue=()))
            changes = [_changed_region(y, old, new) for y, (old, new) in rows if old != new]
            if any(changes):
                # Without a region, Textual would redraw the frame, too.
                self.refresh(*filter(None, changes))

    def _move_cursor(self) -> None:
        """Redraw the columns that the cursor leaves and enters."""
        before, self._cursor_column = self._cursor_column, self._column_of_cursor()
        if self._cursor_column != before:
            columns = (column for column in (before, self._cursor_column) if column is not None)
            self.refresh(*(Region(column, 0, 1, self.size.height) for column in columns))

    def _column_of_cursor(self) -> int | None:
        """Return the column of the cursor; None if it is hidden or beyond the window."""
        low, high = self.window.low, self.window.high
        if self._cursor_x is None or not self.drawn_plot.area_width or not low <= self._cursor_x <= high:
            return None
        return self.drawn_plot.area_left + round(
            (self._cursor_x - low) / (high - low) * (self.drawn_plot.area_width - 1)
        )

    def render_lines(self, crop: Region) -> list[Strip]:
        if self._drawn_theme != self.app.theme:
            self._drawn_theme = self.app.theme
            self._strips.clear()
        strips, column = super().render_lines(crop), self._cursor_column
        if column is not None:
            gutter, cursor = self.styles.gutter, self._cursor_cell()
            for row in range(len(self.drawn_plot.rows) - self.drawn_plot.axis_lines):
                y = row + gutter.top - crop.y
                if 0 <= y < len(strips):
                    strips[y] = self._with_cursor(row, strips[y], column + gutter.left - crop.x, cursor)
        return strips

    def _cursor_cell(self) -> Segment:
        """Return the cursor in the colors of the terminal, as the lines that it is put over."""
        strip = Strip([Segment(CURSOR_CHARACTER, self.line_style[0] + CURSOR_STYLE)])
        for line_filter in self.get_line_filters():
            strip = strip.apply_filter(line_filter, self.background_colors[1])
        return next(iter(strip))

    def _with_cursor(self, row: int, strip: Strip, column: int, cursor: Segment) -> Strip:
        """Return a line of the widget with the cursor behind its points, which is kept until one of them changes."""
        key, known = (column, cursor), self._cursor_strips.get(row)
        if known is None or known[0] is not strip or known[1] != key:
            # The best point is often in the cursor's column.
            is_point = strip.text[max(column, 0) :][:1] in (POINT, STAR)
            drawn = strip if is_point else _replace_cell(strip, column, cursor)
            known = self._cursor_strips[row] = strip, key, drawn
        return known[2]

    def render_line(self, y: int) -> Strip:
        """Return a line without the cursor, which is kept until its text, its style or its width changes."""
        row = self.drawn_plot.rows[y] if y < len(self.drawn_plot.rows) else []
        (base, width), known = self.line_style, self._strips.get(y)
        key = (row, base, width)
        if known is None or known[0] != key:
            segments = [Segment(text, self.style_of(style)) for text, style in row]
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
        """Show the legend: marker, label and value of each curve in its color."""
        curves = self.curves if self.has_legend else []
        for has_markers, gap in LEGEND_FORMATS:
            parts = [self._legend_part(curve, has_marker=has_markers or curve.is_dashed) for curve in curves]
            columns = len(gap.join(filter(None, [self._title, *parts]))) + TITLE_MARGIN
            if columns <= self.size.width:
                break
        in_title = columns + len(f"  {self._best}") <= self.size.width
        # A value that is cut off would be another one.
        has_room = columns <= self.size.width
        pairs = zip(curves, parts, strict=True)
        legend = [f"[{theme_variable(curve.style)}]{escape_markup(part)}[/]" for curve, part in pairs if part]
        title = [escape_markup(self._title), *(legend if has_room else []), self._best if in_title else ""]
        note = [*([] if has_room else legend), "" if in_title else self._best, *self._off_scale(), self._note_text]
        self.set_titles(gap.join(filter(None, title)), "  ".join(filter(None, note)))

    def _off_scale(self) -> Iterator[str]:
        """Yield what is off scale: `2 runs above` of several runs, else the names of the curves."""
        for count, place in zip(self.drawn_plot.off_scale, ("above", "below"), strict=True):
            if count:
                what = pluralize(count, "run" if any(curve.mark for curve in self.curves) else "curve")
                yield f"[$warning]{what} {place}[/], y all"

    def _legend_part(self, curve: Curve, *, has_marker: bool) -> str:
        value = curve_value(curve, self._cursor_x)
        text = UNKNOWN if value is None else format_value(value)
        return " ".join(filter(None, (marker_of(curve) if has_marker else "", curve.label, text)))


def marker_of(curve: Curve) -> str:
    """Return what stands for a curve in a legend."""
    return "╌" if curve.is_dashed else "─"


def curve_value(curve: Curve, x: float | None) -> float | None:
    """Return the value of a curve at `x`, or the latest one; None if it is unknown."""
    series = curve.values
    if x is None:
        return series.latest() if curve.latest is None else curve.latest
    # A curve that ends before `x` by more than the distance of its points has no value there.
    past = len(series.x) > 1 and x - series.x[-1] > series.x[-1] - series.x[-2]
    return None if past else series.value_at(x)


def format_value(value: float) -> str:
    """Format a value of a curve with four decimals, or with three digits if it is small or large."""
    return f"{value:.4f}" if 0.01 <= abs(value) < 100 else format_number(value, 3)


def _replace_cell(strip: Strip, column: int, cell: Segment) -> Strip:
    """Return a line with another cell at `column`. All characters of a plot are one cell wide.

    Dividing the strip and joining its parts takes three times as long.
    """
    segments, start = [], 0
    for segment in strip:
        offset, start = column - start, start + len(segment.text)
        if not 0 <= offset < len(segment.text):
            segments.append(segment)
            continue
        first, last = segment.text[:offset], segment.text[offset + 1 :]
        parts = [Segment(first, segment.style), cell, Segment(last, segment.style)]
        segments += [part for part in parts if part.text]
    return Strip(segments, strip.cell_length)


def _changed_region(y: int, old: Sequence[Piece], new: Sequence[Piece]) -> Region:
    """Return the cells of a line from the first to the last one that differs."""
    width = max(sum(len(text) for text, _ in row) for row in (old, new))
    first = _equal_columns(old, new)
    end = width - _equal_columns(
        [(text[::-1], style) for text, style in reversed(old)], [(text[::-1], style) for text, style in reversed(new)]
    )
    return Region(first, y, max(end - first, 0), 1)


def _equal_columns(old: Sequence[Piece], new: Sequence[Piece]) -> int:
    """Return the number of cells at the beginning of two lines that are equal."""
    columns = 0
    for (before, old_style), (after, new_style) in zip(old, new, strict=False):
        length = min(len(before), len(after)) if old_style == new_style else 0
        equal = next((column for column in range(length) if before[column] != after[column]), length)
        columns += equal
        if not equal == len(before) == len(after):
            break
    return columns
