"""The parts of Textual 8 that are private, and what is drawn without them: a missing one takes Textual's plain way.

Each saves more than a tenth of the CPU time or of the bytes of a key (`tests/bench/screen.py`):
- `ShownCells`: Textual writes all cells from the left edge of a widget to those that changed, 27 KB for a move of
  the cursor in charts of 160 columns, and all cells of the terminal when a screen or a dialog opens or closes.
- `LayeredCompositor`: Textual renders all widgets when one of them changes. It tints and sends all that is behind a
  dialog again: 35 KB/s over the screen of a run of 160x48, compared with 1.5 KB/s.
- `frame_lines`: Textual looks up the styles of a widget for each of its lines, a third of the time that it takes to
  draw a moved cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat, takewhile
from typing import Any

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.css.styles import StylesBase
from textual.geometry import Region, Size, Spacing
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

try:
    from textual._compositor import ChopsUpdate, Compositor, CompositorUpdate
except ImportError:
    ChopsUpdate = Compositor = CompositorUpdate = None  # type: ignore[assignment, misc]
try:
    from textual._styles_cache import StylesCache
except ImportError:
    StylesCache = None  # type: ignore[assignment, misc]

# To move the terminal's cursor takes as many bytes as this number of cells.
MAX_EQUAL_CELLS = 8
# To compare a line of a chart cell by cell takes longer than to write it.
MAX_COMPARED_CELLS = 40


def frame_lines(widget: Widget) -> None:
    """Let a widget keep the sides of its frame, which are the same cells beside each line."""
    if StylesCache is not None and isinstance(getattr(widget, "_styles_cache", None), StylesCache):
        widget._styles_cache = FramedLines()


def layer(screen: Screen[Any]) -> None:
    """Let a screen render only what changes. A dialog is a layer over the screen below it."""
    if Compositor is not None and isinstance(getattr(screen, "_compositor", None), Compositor):
        screen._compositor = LayeredCompositor()


def refresh_below(screen: Screen[Any]) -> bool:
    """Redraw what changed in a screen below a dialog. Return whether the screen is one that can be redrawn so.

    Textual would redraw what had changed before, too.
    """
    compositor = getattr(screen, "_compositor", None)
    if Compositor is None or not isinstance(compositor, LayeredCompositor) or screen is screen.app.screen:
        return False
    if compositor._dirty_regions:
        screen.app.screen.refresh(*compositor._dirty_regions)
        compositor._dirty_regions.clear()
    screen._dirty_widgets.clear()
    return True


class ShownCells:
    """The cells that the terminal shows. Those that an update does not change are not written again."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, Strip]] = {}
        """The strips of each line by their columns."""

    def clear(self) -> None:
        """Expect anything on the terminal."""
        self._rows.clear()

    def changes(self, update: Any, console: Console) -> Any:
        """Return an update of the screen as one that writes only the cells that change; None if none does."""
        if ChopsUpdate is None or not isinstance(update, ChopsUpdate):
            self.clear()
            return update
        parts: list[str] = []
        for y in dict.fromkeys(y for y, _, _ in update.spans):
            parts += self._change_row(y, update.chops[y], update.chop_ends[y], console)
        return WrittenCells("".join(parts)) if parts else None

    def _change_row(
        self, y: int, strips: Mapping[int, Strip | None], ends: Sequence[int], console: Console
    ) -> Iterator[str]:
        """Yield the cells that change in a line, each stretch after the sequence that moves the cursor to it. A strip
        that is None stays as it is."""
        before = self._rows.pop(y, {})
        if before and before.keys() != strips.keys():
            line = Strip.join(before.values())
            before = {x: line.crop(x, end) for x, end in zip(strips, ends, strict=True)}
        for x, strip in strips.items():
            if strip is not None and strip is not before.get(x):
                for start, end in _changed_stretches(before.get(x), strip):
                    yield f"\x1b[{y + 1};{x + start + 1}H"
                    yield from _render_cells(strip, start, end, console)
                before[x] = strip
        if before.keys() == strips.keys():
            # In the order of the columns.
            self._rows[y] = {x: before[x] for x in strips}


def _changed_stretches(before: Strip | None, after: Strip) -> list[tuple[int, int]]:
    """Return the first column and the end of each stretch of cells that differ."""
    width = after.cell_length
    if before is None or before.cell_length != width:
        return [(0, width)]
    old, new = list(before), list(after)
    start, end = _equal_cells(old, new), width - _equal_cells(old[::-1], new[::-1])
    # Where no character is two cells wide, the index of a character is its column.
    if end - start > MAX_COMPARED_CELLS or not len(before.text) == len(after.text) == width:
        return [(start, end)] if start < end else []
    stretches: list[tuple[int, int]] = []
    cells = zip(*(line[start:end] for strip in (before, after) for line in (strip.text, _looks(strip))), strict=True)
    for column in [column for column, (a, x, b, y) in enumerate(cells, start) if a != b or x != y]:
        first = stretches.pop()[0] if stretches and column - stretches[-1][1] <= MAX_EQUAL_CELLS else column
        stretches.append((first, column + 1))
    return stretches


def _equal_cells(old: Sequence[Segment], new: Sequence[Segment]) -> int:
    """Return the number of cells in the segments that are equal at the beginning of two lines."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))
    return sum(segment.cell_length for segment, _ in pairs)


def _looks(strip: Strip) -> list[int]:
    """Return a number for the style of each cell."""
    return [look for text, style, _ in strip for look in repeat(hash(style), len(text))]


def _render_cells(strip: Strip, start: int, stop: int, console: Console) -> Iterator[str]:
    """Yield the cells from `start` to `stop` of a strip with their styles. `Strip.crop` takes three times as long."""
    if start == 0 and stop == strip.cell_length:
        yield strip.render(console)
        return
    colors, column = COLOR_SYSTEMS.get(console.color_system or "", ColorSystem.TRUECOLOR), 0
    for segment in strip:
        if column >= stop:
            return
        end = column + segment.cell_length
        if end > start:
            if end > stop:
                segment = segment.split_cells(stop - column)[0]
            if column < start:
                segment = segment.split_cells(start - column)[1]
            yield Strip.render_style(segment.style, segment.text, colors) if segment.style else segment.text
        column = end


if Compositor is not None:

    class WrittenCells(CompositorUpdate):
        """An update that is already text for the terminal."""

        def __init__(self, text: str) -> None:
            self._text = text

        def render_segments(self, console: Console) -> str:
            """Return the text."""
            return self._text

    class LayeredCompositor(Compositor):
        """Renders only the widgets that an update touches, and a dialog as a layer over the screen below it."""

        def __init__(self) -> None:
            super().__init__()
            self._changes: list[Region] = []
            """The regions of the update; none if all is rendered."""
            self._merged: tuple[list[list[int]], list[list[int]], list[list[int]]] | None = None
            """The cuts of this screen, of the one below, and of both."""

        @property
        def _below(self) -> LayeredCompositor | None:
            """The compositor of the screen below a dialog."""
            if not isinstance(self.root, Screen) or not self.root.is_modal:
                return None
            stack = self.root.app.screen_stack
            lower = stack[stack.index(self.root) - 1] if self.root in stack[1:] else None
            below = getattr(lower, "_compositor", None)
            return below if isinstance(below, LayeredCompositor) and below.size == self.size else None

        @property
        def cuts(self) -> list[list[int]]:
            """The columns where a widget begins or ends, of each line."""
            own, below = super().cuts, self._below
            if below is None:
                return own
            lower = below.cuts
            if self._merged is None or self._merged[0] is not own or self._merged[1] is not lower:
                both = [sorted({*upper, *under}) for upper, under in zip(own, lower, strict=True)]
                self._merged = own, lower, both
            return self._merged[2]

        def render_full_update(self, simplify: bool = False) -> Any:
            """Return all cells, as an update of all lines. A picture of the screen is `simplified`."""
            if simplify:
                return super().render_full_update(simplify=True)
            self._dirty_regions = {self.size.region}
            return self.render_partial_update()

        def render_partial_update(self) -> Any:
            """Return the cells of the regions that have changed."""
            columns: dict[tuple[int, int], Region] = {}
            for region in self._dirty_regions:
                # A chart changes in many lines.
                key = region.x, region.width
                columns[key] = region.union(columns.get(key, region))
            self._changes = list(columns.values())
            update = super().render_partial_update()
            self._changes = []
            return update

        def _get_renders(self, crop: Region | None = None) -> Iterator[tuple[Region, Region, list[Strip]]]:
            crop = crop or self.size.region
            return self._render_widgets(crop, self._changes or [crop])

        def _render_widgets(
            self, crop: Region, changes: Sequence[Region]
        ) -> Iterator[tuple[Region, Region, list[Strip]]]:
            """Yield the region, the visible part and its lines of each widget that overlaps the changes, the top one
            first."""
            below, lines = self._below, Region(0, crop.y, self.size.width, crop.height)
            for widget, (region, clip) in self.visible_widgets.items():
                visible = region.intersection(clip).intersection(lines)
                if (below is None or widget is not self.root) and any(map(visible.overlaps, changes)):
                    yield region, visible, widget.render_lines(visible.translate(-region.offset))
            if below is not None:
                yield from below._render_widgets(crop, changes)


if StylesCache is not None:

    class FramedLines(StylesCache):
        """Puts the frame of a panel around its lines; `tui.widgets.lines` draws them."""

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
