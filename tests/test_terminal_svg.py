"""The SVG pictures of the README: lines that are stored once, columns, and colors."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from support.gputrain_command import ROOT
from support.screen.terminal_svg import CELL_WIDTH, Cell, Frame, picture


def line(text: str, background: str = "") -> tuple[Cell, ...]:
    return tuple(Cell(character, "#ffffff", background) for character in text)


def test_picture_stores_equal_lines_once() -> None:
    frames = [Frame(0.0, (line("same"), line("old "))), Frame(1.0, (line("same"), line("new ")))]
    svg = picture(frames, 2.0, "#000000", "title")
    assert [svg.count(f">{word}<") for word in ("same", "old", "new")] == [1, 1, 1]
    assert "50%{transform" in svg


def test_picture_without_second_frame_has_no_animation() -> None:
    assert "@keyframes" not in picture([Frame(0.0, (line("text"),))], 1.0, "#000000", "title")


def test_picture_keeps_text_in_its_columns() -> None:
    svg = picture([Frame(0.0, (line("  left  <&  ", "#112233"),))], 1.0, "#000000", "a & b")
    root = ElementTree.fromstring(svg)  # noqa: S314 (our own file)
    [text] = [element for element in root.iter() if element.tag.endswith("text")]
    assert (text.text, float(text.attrib["x"])) == ("left  <&", 2 * CELL_WIDTH)
    assert float(text.attrib["textLength"]) == 8 * CELL_WIDTH


def test_picture_draws_braille_and_blocks_with_its_own_font() -> None:
    pytest.importorskip("fontTools", reason="needs `pip install '.[pictures]'`")
    svg = picture([Frame(0.0, (line("\u28ff\u2588x"),))], 1.0, "#000000", "title")
    drawn, plain = re.findall("<text [^>]*>", svg)
    assert "textLength" not in drawn and "textLength" in plain
    assert "font/woff;base64," in svg


def test_readme_pictures_exist_and_are_small() -> None:
    names = re.findall(r"\]\((\.github/pictures/[^)]+)\)", (ROOT / "README.md").read_text())
    assert len(names) >= 3
    assert all((ROOT / name).stat().st_size < 1_000_000 for name in names)
