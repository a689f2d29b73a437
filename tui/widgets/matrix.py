"""A confusion matrix: a row for each class, a column for what its images were taken for. The darker a cell the fewer of
the row's images are in it; the cell under the cursor is read out in the frame."""

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

from engine.utils.text import printable
from tui.text.confusion import Counts, cut, percent, shares_of, shortened

# From few to many, in 256 colours; brought to 16 they stay blue for what is right, and red to yellow for what is not.
RIGHT = (
    *("color(231) on color(17)", "color(231) on color(18)", "color(231) on color(25)"),
    *("color(16) on color(32)", "bold color(16) on color(75)"),
)
WRONG = (
    *("color(231) on color(52)", "color(231) on color(88)", "color(231) on color(130)"),
    *("color(16) on color(172)", "bold color(16) on color(214)"),
)
# Shares of a row from which on each shade is taken; fewer mistakes have none.
RIGHT_FROM, WRONG_FROM = (0.0, 0.5, 0.7, 0.85, 0.95), (0.01, 0.03, 0.06, 0.12, 0.25)
NOTHING = Style(dim=True)
CURSOR = Style(reverse=True, bold=True)
MOST_LABEL, LEAST_CELL, MOST_CELL, MOST_TALL = 16, 4, 12, 4


def shade(share: float, *, right: bool) -> Style:
    shades, steps = (RIGHT, RIGHT_FROM) if right else (WRONG, WRONG_FROM)
    reached = sum(share >= step for step in steps)
    return Style.parse(shades[reached - 1]) if reached else Style.null()


class Matrix(Widget, can_focus=True):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1, 0)", show=False),
        Binding("down", "move(1, 0)", show=False),
        Binding("left", "move(0, -1)", show=False),
        Binding("right", "move(0, 1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "go_to(0, 0)", show=False),
        Binding("end", "go_to(1000000, 1000000)", show=False),
    ]

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._names: tuple[str, ...] = ()
        self._labels: list[str] = []
        self._longest = self._digits = 0
        self._counts: Counts = np.zeros((0, 0), np.int64)
        self._shares = shares_of(self._counts)
        self._order: list[int] = []
        self._row = self._column = self._top = self._left = 0

    def show(self, names: Sequence[str], counts: Counts, order: Sequence[int]) -> None:
        """The classes in this order from now on; the cursor stays on its pair of classes."""
        pair = self.pair
        self._names = tuple(map(printable, names))
        self._labels = shortened(self._names, MOST_LABEL)
        self._longest = max(map(cell_len, self._names), default=0)
        self._digits = len(str(counts.max(initial=0)))
        self._counts, self._shares, self._order = counts, shares_of(counts), list(order)
        if pair is None or max(pair) >= len(self._order):
            self.action_go_to(0, 0)
        else:
            self.action_go_to(self._order.index(pair[0]), self._order.index(pair[1]))

    @property
    def pair(self) -> tuple[int, int] | None:
        """The numbers of the true class and of the one it was taken for, under the cursor."""
        return (self._order[self._row], self._order[self._column]) if self._order else None

    def find(self, true: int, taken: int) -> None:
        """Put the cursor on a pair of classes, and that into the middle."""
        row, column = self._order.index(true), self._order.index(taken)
        self._top, self._left = row - self._rows // 2, column - self._columns // 2
        self.action_go_to(row, column)

    # What is where

    @property
    def _label(self) -> int:
        return min(self._longest, MOST_LABEL, max(self.size.width // 4, 6)) + 1

    @property
    def _cell(self) -> int:
        """Cells of a terminal that a count takes across: as many as its name needs, where there is room."""
        least = max(self._digits + 2, LEAST_CELL)
        wanted = min(self._longest + 2, MOST_CELL)
        return max(min((self.size.width - self._label) // max(len(self._order), 1), wanted), least)

    @property
    def _tall(self) -> int:
        """Lines that a row takes: more where there is room, so that cells are less flat."""
        room = (self.size.height - 1) // max(len(self._order), 1)
        return max(min(room, MOST_TALL, self._cell // 2), 1)

    @property
    def _rows(self) -> int:
        return max((self.size.height - 1) // self._tall, 1)

    @property
    def _columns(self) -> int:
        return max((self.size.width - self._label) // self._cell, 1)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if not self._order:
            return Strip.blank(width, self.rich_style)
        shown = self._order[self._left : self._left + self._columns]
        if y == 0:
            names = shortened(self._names, self._cell - 1)
            segments = [Segment(" " * self._label)]
            for place, name in enumerate((names[number] for number in shown), self._left):
                style = CURSOR if place == self._column and self.has_focus else Style(bold=True)
                segments += [Segment(" " * (self._cell - 1 - cell_len(name))), Segment(name, style), Segment(" ")]
            return Strip(segments).adjust_cell_length(width, self.rich_style)
        place, line = self._top + (y - 1) // self._tall, (y - 1) % self._tall
        if place >= len(self._order):
            return Strip.blank(width, self.rich_style)
        return Strip(self._row_segments(place, shown, middle=line == self._tall // 2)).adjust_cell_length(
            width, self.rich_style
        )

    def _row_segments(self, place: int, shown: Sequence[int], *, middle: bool) -> list[Segment]:
        true = self._order[place]
        segments = [Segment(" " * self._label)]
        if middle:
            name = cut(self._labels[true], self._label - 1)
            style = CURSOR if place == self._row and self.has_focus else Style(bold=True)
            segments = [Segment(name, style), Segment(" " * (self._label - cell_len(name)))]
        for column, taken in enumerate(shown, self._left):
            count, share = int(self._counts[true, taken]), float(self._shares[true, taken])
            style = shade(share, right=true == taken) if count else NOTHING
            if self.has_focus and (place, column) == (self._row, self._column):
                style += CURSOR
            text = str(count or "·") if middle else ""
            segments.append(Segment(f"{text:>{self._cell - 1}} ", style))
        return segments

    # The cursor

    def action_move(self, rows: int, columns: int) -> None:
        self.action_go_to(self._row + rows, self._column + columns)

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(self._rows - 1, 1), 0)

    def action_go_to(self, row: int, column: int) -> None:
        last = max(len(self._order) - 1, 0)
        self._row, self._column = min(max(row, 0), last), min(max(column, 0), last)
        self._top = _seen(self._top, self._row, self._rows, len(self._order))
        self._left = _seen(self._left, self._column, self._columns, len(self._order))
        self._tell()
        self.refresh()

    def _tell(self) -> None:
        pair = self.pair
        if pair is None:
            self.border_title = self.border_subtitle = None
            return
        true, taken = pair
        count, share = int(self._counts[true, taken]), float(self._shares[true, taken])
        how = "right" if true == taken else f"taken for {self._names[taken]}"
        of = int(self._counts[true].sum())
        # What comes from outside is not read as markup.
        self.border_title = f"{self._names[true]} {how}: {count:,} of {of:,}, {percent(share)}".replace("[", "\\[")
        classes, rows, columns = len(self._order), self._rows, self._columns
        part = ""
        if classes > min(rows, columns):
            part = (
                f"rows {self._top + 1}-{min(self._top + rows, classes)}, "
                f"columns {self._left + 1}-{min(self._left + columns, classes)} of {classes}   "
            )
        self.border_subtitle = f"{part}row: true, column: taken for"

    def on_resize(self) -> None:
        self.action_go_to(self._row, self._column)

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        if place is not None and place.y > 0 and place.x >= self._label:
            row, column = (place.y - 1) // self._tall, (place.x - self._label) // self._cell
            self.action_go_to(self._top + row, self._left + column)

    def on_mouse_scroll_down(self) -> None:
        self.action_move(1, 0)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-1, 0)


def _seen(first: int, place: int, room: int, of: int) -> int:
    """The first of those that are shown, moved as little as brings `place` among them."""
    first = min(max(first, place - room + 1), place)
    return max(min(first, of - room), 0)
