"""Tables fit their width, whatever their cells hold."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from engine.base.units import UNKNOWN
from engine.report.table import Align, Column, Line, Shorten, fit, plain_lines, text_cells

TEXTS = st.text(st.sampled_from(string.ascii_letters + " –…花朵\u0301\u200b\x1b\x07\x00\n\t\u202e🙂"), max_size=40)
CELLS = st.one_of(st.just(""), st.just(UNKNOWN), TEXTS, st.lists(st.tuples(TEXTS, st.just("bold"))).map(tuple))
Cells = tuple[Any, ...]


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Column[Cells]], list[Cells]]:
    columns = [
        Column[Cells](
            str(index),
            draw(TEXTS),
            lambda row, index=index: row[index],  # type: ignore[misc]
            draw(st.sampled_from(Align)),
            width=draw(st.integers(0, 30)),
            max_width=draw(st.integers(0, 30)),
            priority=draw(st.integers(-1, 2)),
            flex=draw(st.booleans()),
            optional=draw(st.booleans()),
            shorten=draw(st.sampled_from(Shorten)),
        )
        for index in range(draw(st.integers(0, 6)))
    ]
    return columns, draw(st.lists(st.tuples(*(CELLS for _ in columns)), max_size=4))


@given(tables(), st.integers(20, 250), st.data())
def test_table_is_never_wider_than_its_width(
    table: tuple[list[Column[Cells]], list[Cells]], width: int, data: st.DataObject
) -> None:
    columns, rows = table
    measured = rows[: data.draw(st.integers(0, len(rows)))]
    fitted = fit(columns, measured, width)
    rest = data.draw(st.none() | st.tuples(st.sampled_from("012345"), CELLS))
    for line in (fitted.header(), *(fitted.line(row) for row in rows), *(fitted.line(row, rest) for row in rows)):
        assert cell_len(text_of(line)) <= width and text_of(line).isprintable()


@given(tables())
def test_plain_table_has_every_cell_in_full(table: tuple[list[Column[Cells]], list[Cells]]) -> None:
    columns, rows = table
    shown = [column for column in columns if not column.optional]
    lines = plain_lines(shown, rows)
    for line, row in zip(lines[1:], rows, strict=True):
        assert all(cell.strip() in line for cell in text_cells(shown, row))


def test_middle_of_last_span_is_shortened() -> None:
    column = Column[str]("name", "", lambda name: (("! ", "bold"), (name, "")), max_width=12, shorten=Shorten.MIDDLE)
    table = fit([column], ["a-long-name-17"], 80)
    assert text_of(table.line("a-long-name-17")) == "! a-l…ame-17"
