"""The confusion matrix widget: a row per true class, a column per predicted class.

The background color encodes the cell's share of its row, brighter for larger shares. The frame's title describes the
cell under the cursor. `tui.screens.confusion` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.strip import Strip
from textual.widget import Widget

from engine.base.text import printable
from engine.base.units import format_share
from engine.report.table import shorten
from engine.runs.evaluations import ConfusionCounts, row_shares
from tui.screens.tables.confusion import shorten_names
from tui.terminal.palette import CORRECT, MUTED, WRONG

# The smallest share of a row for each style; mistakes below the first threshold have no background.
CORRECT_THRESHOLDS, WRONG_THRESHOLDS = (0.0, 0.5, 0.7, 0.85, 0.95), (0.01, 0.03, 0.06, 0.12, 0.25)
CURSOR_STYLE = Style(reverse=True, bold=True)
MAX_LABEL_WIDTH, MIN_CELL_WIDTH, MAX_CELL_WIDTH, MAX_CELL_HEIGHT = 16, 4, 12, 4


def cell_style(share: float, *, correct: bool) -> str:
    """Return the name of the style of a cell that holds `share` of its row's images; "" for a negligible share."""
    styles, thresholds = (CORRECT, CORRECT_THRESHOLDS) if correct else (WRONG, WRONG_THRESHOLDS)
    level = sum(share >= threshold for threshold in thresholds)
    return styles[level - 1] if level else ""


class Matrix(Widget, can_focus=True):
    """A scrollable confusion matrix with a cursor on one pair of classes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1, 0)", show=False),
        Binding("down,j", "move(1, 0)", show=False),
        Binding("left", "move(0, -1)", show=False),
        Binding("right", "move(0, 1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "go_to(0, 0)", show=False),
        Binding("end,G", "go_to(1000000, 1000000)", show=False),
    ]

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._names: tuple[str, ...] = ()
        self._labels: list[str] = []
        self._longest_name = self._count_digits = 0
        self._counts: ConfusionCounts = np.zeros((0, 0), np.int64)
        self._shares = row_shares(self._counts)
        self._order: list[int] = []
        self._cursor_row = self._cursor_column = self._first_row = self._first_column = 0

    def set_data(self, names: Sequence[str], counts: ConfusionCounts, order: Sequence[int]) -> None:
        """Show `counts`, an array of shape (classes, classes), with rows and columns in `order`.

        The cursor stays on its pair of classes.
        """
        pair = self.pair
        self._names = tuple(map(printable, names))
        self._labels = shorten_names(self._names, MAX_LABEL_WIDTH)
        self._longest_name = max(map(cell_len, self._names), default=0)
        self._count_digits = len(str(counts.max(initial=0)))
        self._counts, self._shares, self._order = counts, row_shares(counts), list(order)
        if pair is None or max(pair) >= len(self._order):
            self.action_go_to(0, 0)
        else:
            self.action_go_to(self._order.index(pair[0]), self._order.index(pair[1]))

    @property
    def pair(self) -> tuple[int, int] | None:
        """Indices of the true and the predicted class under the cursor."""
        return (self._order[self._cursor_row], self._order[self._cursor_column]) if self._order else None

    def select_pair(self, true_class: int, predicted_class: int) -> None:
        """Move the cursor to a pair of classes and center it."""
        row, column = self._order.index(true_class), self._order.index(predicted_class)
        self._first_row, self._first_column = row - self._visible_rows // 2, column - self._visible_columns // 2
        self.action_go_to(row, column)

    @property
    def _label_width(self) -> int:
        return min(self._longest_name, MAX_LABEL_WIDTH, max(self.size.width // 4, 6)) + 1

    @property
    def _cell_width(self) -> int:
        """Columns per matrix cell: wide enough for the count and, if all classes then fit, for the class names."""
        min_width = max(self._count_digits + 2, MIN_CELL_WIDTH)
        name_width = min(self._longest_name + 2, MAX_CELL_WIDTH)
        return max(min((self.size.width - self._label_width) // max(len(self._order), 1), name_width), min_width)

    @property
    def _cell_height(self) -> int:
        """Lines per matrix row: more if there is room, so that cells are closer to square."""
        room = (self.size.height - 1) // max(len(self._order), 1)
        return max(min(room, MAX_CELL_HEIGHT, self._cell_width // 2), 1)

    @property
    def _visible_rows(self) -> int:
        return max((self.size.height - 1) // self._cell_height, 1)

    @property
    def _visible_columns(self) -> int:
        return max((self.size.width - self._label_width) // self._cell_width, 1)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        if not self._order:
            return Strip.blank(width, base)
        shown = self._order[self._first_column : self._first_column + self._visible_columns]
        if y == 0:
            names = shorten_names(self._names, self._cell_width - 1)
            segments = [Segment(" " * self._label_width)]
            for column, name in enumerate((names[number] for number in shown), self._first_column):
                style = CURSOR_STYLE if column == self._cursor_column and self.has_focus else Style(bold=True)
                segments += [Segment(" " * (self._cell_width - 1 - cell_len(name))), Segment(name, style), Segment(" ")]
            return Strip(Segment.apply_style(segments, base)).adjust_cell_length(width, base)
        row, line = self._first_row + (y - 1) // self._cell_height, (y - 1) % self._cell_height
        if row >= len(self._order):
            return Strip.blank(width, base)
        row_segments = self._row_segments(row, shown, middle=line == self._cell_height // 2)
        return Strip(Segment.apply_style(row_segments, base)).adjust_cell_length(width, base)

    def _row_segments(self, row: int, shown: Sequence[int], *, middle: bool) -> list[Segment]:
        true = self._order[row]
        segments = [Segment(" " * self._label_width)]
        if middle:
            name = shorten(self._labels[true], self._label_width - 1)
            style = CURSOR_STYLE if row == self._cursor_row and self.has_focus else Style(bold=True)
            segments = [Segment(name, style), Segment(" " * (self._label_width - cell_len(name)))]
        for column, predicted in enumerate(shown, self._first_column):
            count, share = int(self._counts[true, predicted]), float(self._shares[true, predicted])
            name = (cell_style(share, correct=true == predicted) if count else "") or MUTED
            style = self.app.console.get_style(name)
            if self.has_focus and (row, column) == (self._cursor_row, self._cursor_column):
                # Some of the cell colors, reversed, look like a cell without the cursor.
                style = CURSOR_STYLE
            text = str(count or "·") if middle else ""
            segments.append(Segment(f"{text:>{self._cell_width - 1}} ", style))
        return segments

    def action_move(self, rows: int, columns: int) -> None:
        self.action_go_to(self._cursor_row + rows, self._cursor_column + columns)

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(self._visible_rows - 1, 1), 0)

    def action_go_to(self, row: int, column: int) -> None:
        last = max(len(self._order) - 1, 0)
        self._cursor_row, self._cursor_column = min(max(row, 0), last), min(max(column, 0), last)
        self._first_row = _scroll_start(self._first_row, self._cursor_row, self._visible_rows, len(self._order))
        self._first_column = _scroll_start(
            self._first_column, self._cursor_column, self._visible_columns, len(self._order)
        )
        self._update_titles()
        self.refresh()

    def _update_titles(self) -> None:
        pair = self.pair
        if pair is None:
            self.border_title = self.border_subtitle = None
            return
        true, predicted = pair
        count, share = int(self._counts[true, predicted]), float(self._shares[true, predicted])
        outcome = "predicted correctly" if true == predicted else f"predicted as {self._names[predicted]}"
        row_total = int(self._counts[true].sum())
        # Class names may contain markup characters.
        self.border_title = f"{self._names[true]} {outcome}: {count:,} of {row_total:,}, {format_share(share)}".replace(
            "[", "\\["
        )
        classes, rows, columns = len(self._order), self._visible_rows, self._visible_columns
        visible = [
            f"{name} {first + 1}-{min(first + shown, classes)}"
            for name, first, shown in (("rows", self._first_row, rows), ("columns", self._first_column, columns))
            if shown < classes
        ]
        visible_part = f"{', '.join(visible)} of {classes}   " if visible else ""
        self.border_subtitle = f"{visible_part}row: true, column: predicted"

    def on_resize(self) -> None:
        self.action_go_to(self._cursor_row, self._cursor_column)

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and offset.y > 0 and offset.x >= self._label_width:
            row, column = (offset.y - 1) // self._cell_height, (offset.x - self._label_width) // self._cell_width
            self.action_go_to(self._first_row + row, self._first_column + column)

    def on_mouse_scroll_down(self) -> None:
        self.action_move(1, 0)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-1, 0)


def _scroll_start(first: int, index: int, room: int, total: int) -> int:
    """Return the first visible index, scrolled as little as needed to make `index` visible."""
    first = min(max(first, index - room + 1), index)
    return max(min(first, total - room), 0)
