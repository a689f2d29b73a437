"""The parts of Textual 8 that are private, and what is drawn without them: a missing one takes Textual's plain way.

Each saves more than a tenth of the CPU time or of the bytes of a key (`tests/bench/screen.py`):
- `changed_cells`: Textual writes all cells from the left edge of a widget to those that changed, 27 KB for a move of
  the cursor in charts of 160 columns.
- `frame_lines`: Textual looks up the styles of a widget for each of its lines, a third of the time that it takes to
  draw a moved cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.css.styles import StylesBase
from textual.geometry import Size, Spacing
from textual.strip import Strip
from textual.widget import Widget

try:
    from textual._compositor import ChopsUpdate
except ImportError:
    ChopsUpdate = None  # type: ignore[assignment, misc]
try:
    from textual._styles_cache import StylesCache
except ImportError:
    StylesCache = None  # type: ignore[assignment, misc]


def changed_cells(update: Any) -> Any:
    """Return an update of the screen as one that writes only the cells that changed."""
    if ChopsUpdate is None or not isinstance(update, ChopsUpdate):
        return update
    return ChangedCells(update.chops, update.spans, update.chop_ends)


def frame_lines(widget: Widget) -> None:
    """Let a widget keep the sides of its frame, which are the same cells beside each line."""
    if StylesCache is not None and isinstance(getattr(widget, "_styles_cache", None), StylesCache):
        widget._styles_cache = FramedLines()


if ChopsUpdate is not None:

    class ChangedCells(ChopsUpdate):
        """An update that writes only the cells that changed."""

        def render_segments(self, console: Console) -> str:
            """Return the cells, each stretch after the sequence that moves the terminal's cursor to it."""
            parts = []
            for y, first, end in self.spans:
                for (x, strip), strip_end in zip(self.chops[y].items(), self.chop_ends[y], strict=True):
                    start, stop = max(x, first), min(strip_end, end)
                    if strip is not None and start < stop:
                        parts += [f"\x1b[{y + 1};{start + 1}H", *_render_cells(strip, start - x, stop - x, console)]
            return "".join(parts)


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


if StylesCache is not None:

    class FramedLines(StylesCache):
        """Puts the frame of a panel around its lines; `tui.screens.widgets.lines` draws them."""

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
