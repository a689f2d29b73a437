"""The private parts of Textual: what is written for a change of the screen, and the plain way without them."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widgets import Static

from tui.terminal import textual_internals
from tui.terminal.textual_internals import ChangedCells, changed_cells, frame_lines

CONSOLE = Console(color_system="truecolor")
BOLD = Style(bold=True)


def written(spans: list[tuple[int, int, int]], *strips: Strip) -> str:
    """Return what is written for `spans` of a line of strips, one beside the other."""
    ends, chops, column = [], {}, 0
    for strip in strips:
        chops[column] = strip
        column += strip.cell_length
        ends.append(column)
    return ChangedCells([chops], spans, [ends]).render_segments(CONSOLE)


def test_changed_cells_writes_only_the_cells_of_the_span() -> None:
    strip = Strip([Segment("abc"), Segment("def", BOLD), Segment("ghi")])
    assert written([(0, 4, 5)], strip) == "\x1b[1;5H\x1b[1me\x1b[0m"
    assert written([(0, 2, 7)], strip) == "\x1b[1;3Hc\x1b[1mdef\x1b[0mg"
    assert written([(0, 0, 9)], strip) == "\x1b[1;1Habc\x1b[1mdef\x1b[0mghi"


def test_changed_cells_writes_each_strip_of_a_span() -> None:
    strips = [Strip([Segment("abc")]), Strip([Segment("def")])]
    assert written([(0, 2, 4)], *strips) == "\x1b[1;3Hc\x1b[1;4Hd"
    assert written([(0, 3, 6)], *strips) == "\x1b[1;4Hdef"


def test_changed_cells_replaces_half_of_a_wide_character_by_a_blank() -> None:
    strip = Strip([Segment("a界b")])
    assert written([(0, 2, 4)], strip) == "\x1b[1;3H b"


def test_without_the_private_parts_textual_draws_in_its_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    update, widget = ChangedCells([{}], [], [[]]), Static()
    for name in ("ChopsUpdate", "StylesCache"):
        monkeypatch.setattr(textual_internals, name, None)
    before = widget._styles_cache
    frame_lines(widget)
    assert changed_cells(update) is update
    assert widget._styles_cache is before
