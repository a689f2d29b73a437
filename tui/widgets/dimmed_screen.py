"""The screen below a dialog, in dimmed colors. Each color is computed once."""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.color import Color
from textual.css.styles import RulesMap
from textual.renderables.background_screen import BackgroundScreen
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual

MAX_STYLES = 4096


class DimmedScreen(Visual):
    """Renders the lines of a screen in the colors that `BackgroundScreen` gives it."""

    def __init__(self, strips: list[Strip], color: Color) -> None:
        self._strips, self._color = strips, color

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        dimmed = [Strip([self._dim(segment) for segment in strip], strip.cell_length) for strip in self._strips]
        return [strip.adjust_cell_length(width) for strip in dimmed[:height]]

    def _dim(self, segment: Segment) -> Segment:
        return Segment(segment.text, dimmed_style(segment.style or RichStyle.null(), self._color), segment.control)

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:
        return container_width

    def get_height(self, rules: RulesMap, width: int) -> int:
        return len(self._strips)


@lru_cache(maxsize=MAX_STYLES)
def dimmed_style(style: RichStyle, color: Color) -> RichStyle:
    """Return a style as Textual dims it, without links."""
    (segment,) = BackgroundScreen.process_segments([Segment("", style)], color)
    return segment.style or style
