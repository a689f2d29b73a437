"""The private parts of Textual: what is written for a change of the screen, and the plain way without them."""

from __future__ import annotations

import asyncio

import pytest
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual._compositor import ChopsUpdate
from textual.app import App, ComposeResult
from textual.screen import ModalScreen, Screen
from textual.strip import Strip
from textual.widgets import Static

from tui import textual_internals
from tui.textual_internals import ShownCells, frame_lines, layer
from tui.widgets.text_line import TextLine

CONSOLE = Console(color_system="truecolor")
BOLD = Style(bold=True)
BEFORE = Strip([Segment("abc"), Segment("def", BOLD), Segment("ghijklmnopqr")])


def line(*strips: Strip | None, columns: tuple[int, ...] = (0,), width: int = 18) -> ChopsUpdate:
    """Return an update of the first line by strips that begin at these columns. None is a strip that is not drawn."""
    return ChopsUpdate([dict(zip(columns, strips, strict=True))], [(0, 0, width)], [[*columns[1:], width]])


def written(*updates: ChopsUpdate) -> str | None:
    """Return what is written for the last one of these updates."""
    cells = ShownCells()
    changes = [cells.changes(update, CONSOLE) for update in updates]
    return None if changes[-1] is None else changes[-1].render_segments(CONSOLE)


def test_shown_cells_writes_a_line_that_is_not_known() -> None:
    assert written(line(BEFORE)) == "\x1b[1;1Habc\x1b[1mdef\x1b[0mghijklmnopqr"


def test_shown_cells_writes_nothing_without_a_change() -> None:
    assert written(line(BEFORE), line(Strip(list(BEFORE)))) is None


def test_shown_cells_writes_each_stretch_that_changes() -> None:
    after = Strip([Segment("aXc"), Segment("def", BOLD), Segment("ghijklmnopqR")])
    assert written(line(BEFORE), line(after)) == "\x1b[1;2HX\x1b[1;18HR"


def test_shown_cells_writes_a_cell_whose_style_changes() -> None:
    after = Strip([Segment("ab"), Segment("cdef", BOLD), Segment("ghijklmnopqr")])
    assert written(line(BEFORE), line(after)) == "\x1b[1;3H\x1b[1mc\x1b[0m"


def test_shown_cells_writes_a_line_with_wide_characters_whole() -> None:
    first, second = (Strip([Segment(f"{letter}界bcd")]) for letter in "ab")
    assert written(line(first, width=6), line(second, width=6)) == "\x1b[1;1Hb界bcd"


def test_shown_cells_keeps_what_is_not_drawn() -> None:
    left, right, other = (Strip([Segment(text)]) for text in ("abc", "def", "dXf"))
    updates = [
        line(left, right, columns=(0, 3), width=6),
        line(None, other, columns=(0, 3), width=6),
        line(Strip([Segment("abcdXf")]), width=6),
    ]
    assert written(*updates[:2]) == "\x1b[1;5HX"
    # A dialog changes where the strips of a line begin.
    assert written(*updates) is None


class TwoLines(Screen[None]):
    """Two lines of text."""

    def compose(self) -> ComposeResult:
        yield TextLine(id="upper")
        yield TextLine(id="lower")


class Box(ModalScreen[None]):
    """A dialog of one line."""

    CSS = "Box { align: center bottom; background: black 50%; } Box Static { width: 3; height: 1; }"

    def compose(self) -> ComposeResult:
        yield Static("box")


def test_dialog_is_a_layer_over_the_screen_below() -> None:
    async def show() -> list[str]:
        app, screen, box = App[None](), TwoLines(), Box()
        for each in (screen, box):
            layer(each)
        async with app.run_test(size=(9, 2)) as pilot:
            await app.push_screen(screen)
            screen.query_one("#lower", TextLine).show(Text("123456789"))
            await app.push_screen(box)
            await pilot.pause()
            return [strip.text for strip in box._compositor.render_strips()]

    assert asyncio.run(show()) == [" " * 9, "123box789"]


def test_without_the_private_parts_textual_draws_in_its_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    update, widget, screen = line(BEFORE), Static(), Screen[None]()
    for name in ("ChopsUpdate", "Compositor", "StylesCache"):
        monkeypatch.setattr(textual_internals, name, None)
    before = widget._styles_cache, screen._compositor
    frame_lines(widget)
    layer(screen)
    assert ShownCells().changes(update, CONSOLE) is update
    assert (widget._styles_cache, screen._compositor) == before
