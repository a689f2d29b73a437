"""Lines of text as cells: what Rich would render, in exactly the width of the widget."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Span, Text

from tui.screens.widgets.text_line import draw_line

BASE = Style(color="white", bgcolor="black")
CONSOLE = Console(width=80)


def cells(segments: Sequence[Segment]) -> list[tuple[str, Style | None]]:
    return [(character, segment.style) for segment in segments for character in segment.text]


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span(0, 8, "red")],
        [Span(1, 3, "red"), Span(3, 5, "bold")],
        [Span(4, 6, "bold"), Span(0, 2, "red")],
        [Span(0, 6, "red"), Span(2, 4, "bold")],
        [Span(0, 4, "red"), Span(2, 8, "blue")],
        [Span(2, 2, "red"), Span(3, 8, "")],
    ],
)
@pytest.mark.parametrize("style", ["", "italic"])
def test_draw_line_styles_each_character_as_rich_does(spans: list[Span], style: str) -> None:
    text = Text("12345678", style, spans=spans, end="")
    # Rich omits the style of the text itself if it has no other.
    base = BASE + Style.parse(style)
    rendered = [Segment(part, base + (own or Style())) for part, own, _ in text.render(CONSOLE)]
    assert cells(list(draw_line(text, CONSOLE, BASE, 8))) == cells(rendered)


@pytest.mark.parametrize("text", ["", "short", "as long", "longer than the width", "広い文字列です"])
def test_draw_line_fills_exactly_the_width(text: str) -> None:
    strip = draw_line(Text(text), CONSOLE, BASE, 7)
    assert sum(cell_len(segment.text) for segment in strip) == strip.cell_length == 7
    assert ("…" in strip.text) == (cell_len(text) > 7)
