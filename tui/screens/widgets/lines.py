"""A scrollable list of text lines, optionally with a selection cursor. Redraws only the lines that have changed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, Self, overload

from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from tui.screens.widgets.text_line import draw_line
from tui.terminal.palette import CURSOR, CURSOR_BLURRED
from tui.terminal.textual_internals import frame_lines


def escape_markup(text: str) -> str:
    """Return a text for the title of a frame, which Textual parses as markup."""
    return text.replace("[", "\\[")


NO_TEXT = Text("")


@dataclass(frozen=True)
class KeyedRow:
    """A line of text, and further lines below it. `key` identifies the row across updates for the cursor.

    `source` is the text, or returns it: a list of hundreds of runs formats only those that are visible.
    """

    key: str
    source: Text | Callable[[], Text]
    more: tuple[Text, ...] = ()

    @cached_property
    def text(self) -> Text:
        return self.source if isinstance(self.source, Text) else self.source()


class LazyRows(Sequence[KeyedRow]):
    """Rows of one line that are made when they are drawn: a list of 10,000 runs makes those that are visible.

    `keys` identifies the rows, and `make_text` returns the text of a row by its index.
    """

    def __init__(self, keys: Sequence[str], make_text: Callable[[int], Text]) -> None:
        self._keys, self._make_text = keys, make_text
        self._made: dict[int, KeyedRow] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> KeyedRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[KeyedRow]: ...

    def __getitem__(self, index: int | slice) -> KeyedRow | list[KeyedRow]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        row = self._made.get(index)
        if row is None:
            row = self._made[index] = KeyedRow(self._keys[index], partial(self._make_text, index))
        return row

    def find(self, key: str) -> int | None:
        """Return the index of a row; None if no row has this key."""
        try:
            return self._keys.index(key)
        except ValueError:
            return None


def find_row(rows: Sequence[KeyedRow], key: str) -> int | None:
    """Return the index of the row with this key; None if there is none."""
    if isinstance(rows, LazyRows):
        return rows.find(key)
    return next((index for index, row in enumerate(rows) if row.key == key), None)


class Lines(ScrollView, can_focus=True):
    """Rows that scroll below fixed header lines. With `selectable`, one row is under the cursor.

    All rows have as many lines as the tallest one.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("ctrl+u", "page(-0.5)", show=False),
        Binding("ctrl+d", "page(0.5)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Chosen(Message):
        """The user pressed enter on a row or double-clicked it."""

        def __init__(self, lines: Lines, key: str) -> None:
            super().__init__()
            self.lines, self.key = lines, key

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, lines: Lines) -> None:
            super().__init__()
            self.lines = lines

    def __init__(
        self,
        *,
        title: str = "",
        selectable: bool = False,
        focusable: bool = True,
        id: str | None = None,  # noqa: A002 (Textual's name)
        empty_text: Text | None = None,
    ) -> None:
        self._frame_only = self._is_drawing = False
        self._titles = ("", "")
        super().__init__(id=id)
        frame_lines(self)
        self.can_focus = focusable
        self._selectable = selectable
        self._header: list[Text] = []
        self._rows: Sequence[KeyedRow] = []
        self._cursor = 0
        self._line_style: tuple[Style, int] | None = None
        self._top = 0
        self._known_styles: dict[str, Style] = {}
        self._starts: Sequence[int] = (0,)
        """The line at which each row starts, and the one after the last row."""
        self._empty_text = empty_text or Text("")
        self.set_titles(title)

    def set_titles(self, title: str, subtitle: str = "") -> None:
        """Set the title and subtitle of the frame, and redraw that part of the frame only."""
        before, self._titles = self._titles, (title, subtitle)
        width, height = self.size
        self._frame_only = True
        if title != before[0]:
            self.border_title = title
        if subtitle != before[1]:
            self.border_subtitle = subtitle or None
        self._frame_only = False
        rows = [y for y, old, new in zip((-1, height), before, self._titles, strict=True) if old != new]
        if rows:
            self.refresh(*(Region(-1, y, width + 3, 1) for y in rows))

    def refresh(self, *regions: Region, **options: Any) -> Self:
        """Ignore the full refresh that Textual requests when only the frame's titles change."""
        return self if self._frame_only else super().refresh(*regions, **options)

    @property
    def text_width(self) -> int:
        """Columns that a line of text has: the content without the scrollbar."""
        width = self.scrollable_content_region.width
        if self.styles.scrollbar_gutter == "stable" and not self.show_vertical_scrollbar:
            width -= self.styles.scrollbar_size_vertical
        return width

    @property
    def cursor_style(self) -> str:
        """Style of the row under the cursor."""
        return CURSOR if self.has_focus else CURSOR_BLURRED

    @property
    def selected_key(self) -> str | None:
        """Key of the row under the cursor; None without rows or cursor."""
        return self._rows[self._cursor].key if self._selectable and self._rows else None

    @property
    def selected_index(self) -> int | None:
        """Index of the row under the cursor; None without rows or cursor."""
        return self._cursor if self._selectable and self._rows else None

    @property
    def cursor_y(self) -> int:
        """The line of the content with the row under the cursor; outside of the content if it is scrolled away."""
        return len(self._header) + self._starts[self._cursor] - int(self.scroll_offset.y)

    def set_rows(self, rows: Sequence[KeyedRow], header: Sequence[Text] = (), empty_text: Text | None = None) -> None:
        """Replace the rows; without rows, `empty_text` is shown. The cursor follows its row if that still exists."""
        key, before = self.selected_key, self._visible_lines()
        self._empty_text = empty_text or self._empty_text
        lazy = isinstance(rows, LazyRows)
        self._rows, self._header = rows if lazy else list(rows), list(header)
        self._starts = range(len(rows) + 1) if lazy else [*accumulate((1 + len(row.more) for row in rows), initial=0)]
        found = None if key is None else find_row(rows, key)
        self._cursor = min(self._cursor, max(len(rows) - 1, 0)) if found is None else found
        self._update_virtual_size()
        after, width = self._visible_lines(), self.text_width
        changes = (
            self._changed_region(y, width, old, new)
            for y, (old, new) in enumerate(zip(before, after, strict=True))
            if old != new or old[0].style != new[0].style
        )
        if regions := [region for region in changes if region]:
            self.refresh(*regions)

    def set_texts(self, texts: Sequence[Text], header: Sequence[Text] = ()) -> None:
        """Replace the rows by plain lines, identified by their position."""
        self.set_rows([KeyedRow(str(index), text) for index, text in enumerate(texts)], header)

    def _changed_region(self, y: int, width: int, old: tuple[Text, bool], new: tuple[Text, bool]) -> Region:
        """Return the cells of a line from the first to the last one that differs."""
        first, end = 0, width
        before, after = old[0], new[0]
        same_style = old[1] == new[1] and before.style == after.style
        # Where no character is two cells wide, the index of a character is its column.
        if same_style and len(before) == len(after) == before.cell_len == after.cell_len:
            changed = [column for column, (a, b) in enumerate(zip(before.plain, after.plain, strict=True)) if a != b]
            for span in set(before.spans) ^ set(after.spans):
                changed += [span.start, span.end - 1]
            if changed:
                first, end = min(changed), min(max(changed) + 1, end)
        return Region(first, y, max(end - first, 0), 1)

    def _visible_lines(self) -> list[tuple[Text, bool]]:
        """Return each visible line, and whether the cursor is on it."""
        top = int(self.scroll_offset.y)
        return [self._visible_line(y, top) for y in range(self.size.height)]

    def _visible_line(self, y: int, top: int) -> tuple[Text, bool]:
        """Return the line at `y` of the widget if `top` lines are above, and whether the cursor is on it."""
        if y < len(self._header):
            return self._header[y], False
        line = y - len(self._header) + top
        index = bisect_right(self._starts, line) - 1
        if index >= len(self._rows):
            return (self._empty_text if not self._rows and line == 0 else NO_TEXT), False
        row, part = self._rows[index], line - self._starts[index]
        return row.more[part - 1] if part else row.text, self._selectable and index == self._cursor

    def render_lines(self, crop: Region) -> list[Strip]:
        self._line_style, self._top, self._is_drawing = None, int(self.scroll_offset.y), True
        self._known_styles.clear()
        strips = super().render_lines(crop)
        self._is_drawing = False
        return strips

    def style_of(self, name: str) -> Style:
        """Return the style of this name over that of the line. All lines that are drawn at once share it."""
        if (style := self._known_styles.get(name)) is None:
            base = self.line_style[0]
            style = self._known_styles[name] = base + self.app.console.get_style(name) if name else base
        return style

    @property
    def line_style(self) -> tuple[Style, int]:
        """Style and width of each line. Both follow from the style sheet; only a line that is drawn needs them."""
        if self._line_style is None:
            self._line_style = self.visual_style.rich_style, self.text_width
        return self._line_style

    def render_line(self, y: int) -> Strip:
        (text, under_cursor), console = self._visible_line(y, self._top), self.app.console
        base, width = self.line_style
        cursor = console.get_style(self.cursor_style) if under_cursor else None
        index = y if y < len(self._header) else y + self._top
        if self.text_selection is not None and (span := self.text_selection.get_span(index)) is not None:
            text = text.copy()
            text.stylize(CURSOR, span[0], len(text) if span[1] == -1 else span[1])
        strip = draw_line(text, console, base, width, cursor)
        # Textual renders a line alone to find the character under the pointer.
        return strip if self._is_drawing else strip.apply_offsets(0, index)

    @property
    def allow_select(self) -> bool:
        """Whether the mouse selects text, not rows."""
        return self.ALLOW_SELECT and not self._selectable

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        """Return the selected text, and what follows it."""
        lines = range(len(self._header) + self._starts[-1])
        return selection.extract("\n".join(self._visible_line(y, 0)[0].plain for y in lines)), "\n"

    def on_resize(self) -> None:
        before = self.virtual_size
        self._update_virtual_size()
        self.scroll_to_cursor()
        if self.styles.is_auto_height and self.virtual_size != before:
            # A layout that was requested before this change reuses the height without these lines.
            self.call_after_refresh(self.refresh, layout=True)

    def _update_virtual_size(self) -> None:
        """Tell Textual how many lines there are. A change lays out the whole screen, which takes ten milliseconds, so
        all lines that fit count as none unless the height of the widget follows from them."""
        if not self.display:
            # It has no size yet; it is resized when it appears.
            return
        lines = len(self._header) + self._starts[-1]
        size = Size(self.text_width, lines)
        if lines <= self.size.height and not self.styles.is_auto_height:
            size = Size(0, 0)
        if size != self.virtual_size:
            self.virtual_size = size
            self.scroll_to_cursor()

    def watch_show_vertical_scrollbar(self, shown: bool) -> None:
        """Textual moves only a scrollbar that is visible; the lines may have scrolled before."""
        if shown:
            self.vertical_scrollbar.position = self.scroll_y

    def action_move(self, rows: int) -> None:
        if self._selectable:
            self._move_to(self._cursor + rows)
        else:
            self.scroll_relative(y=rows, animate=False)

    def action_page(self, pages: float) -> None:
        rows_per_line = len(self._rows) / max(self._starts[-1], 1)
        rows = int(abs(pages) * max(self.size.height - len(self._header) - 1, 1) * rows_per_line)
        self.action_move(max(rows, 1) if pages > 0 else -max(rows, 1))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave enter to the screen where there is nothing to choose."""
        return action != "choose" or self._selectable

    def action_choose(self) -> None:
        if self.selected_key is not None:
            self.post_message(self.Chosen(self, self.selected_key))

    def _move_to(self, index: int) -> None:
        index = min(max(index, 0), max(len(self._rows) - 1, 0))
        if index == self._cursor:
            return
        old_index, old_top = self._cursor, self.scroll_offset.y
        self._cursor = index
        self.scroll_to_cursor()
        if self.scroll_offset.y == old_top:
            for changed in (old_index, index):
                first, end = self._starts[changed : changed + 2]
                self.refresh(Region(0, len(self._header) + first - int(old_top), self.text_width, end - first))
        else:
            self.refresh()
        self.post_message(self.Moved(self))

    def select_key(self, key: str) -> None:
        """Move the cursor to a row, if it exists."""
        found = find_row(self._rows, key)
        self._move_to(self._cursor if found is None else found)

    def scroll_to_cursor(self) -> None:
        """Scroll so that the row under the cursor is visible."""
        room = max(self.size.height - len(self._header), 1)
        top, first = int(self.scroll_offset.y), self._starts[self._cursor]
        end = self._starts[min(self._cursor + 1, len(self._rows))]
        if self._selectable and not top <= first <= end <= top + room:
            # Of a row that is taller than the room, the first line is shown.
            y = first if first < top else min(end - room, first)
            self.scroll_to(y=y, animate=False, force=True, immediate=True)

    def index_at(self, event: events.Click) -> int | None:
        """Return the index of the row under the pointer, None if there is none."""
        offset = event.get_content_offset(self)
        if offset is None or offset.y < len(self._header):
            return None
        index = bisect_right(self._starts, offset.y - len(self._header) + int(self.scroll_offset.y)) - 1
        return index if index < len(self._rows) else None

    def on_click(self, event: events.Click) -> None:
        index = self.index_at(event)
        if self._selectable and index is not None:
            double_clicked = index == self._cursor and event.chain > 1
            self._move_to(index)
            if double_clicked:
                self.action_choose()
