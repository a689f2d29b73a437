"""Draw what a terminal shows as SVG: one picture, or an animation in which equal lines are stored once.

`recordings/make_pictures.py` uses it. Braille, blocks and lines come from a font in the file (`cell_font`), because
fonts differ in them; all other characters come from the reader's monospace font, stretched to the columns.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

# Sizes in the unit of the picture. A character of DejaVu Sans Mono is as wide as a cell: not all programs stretch text.
FONT_SIZE, CELL_WIDTH, CELL_HEIGHT, BASELINE = 19.93, 12.0, 24.0, 18.0
PADDING = 16.0
FONT_FAMILY = "cells,ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"


@dataclass(frozen=True)
class Cell:
    """One column of a line. Colors are `#rrggbb`; `width` is 2 for a wide character, whose second cell is skipped."""

    text: str
    foreground: str
    background: str
    bold: bool = False
    italic: bool = False
    underlined: bool = False
    width: int = 1

    @property
    def style(self) -> tuple[object, ...]:
        return (self.foreground, self.bold, self.italic, self.underlined, self.is_drawn)

    @property
    def is_drawn(self) -> bool:
        """Whether the character is in `cell_font`."""
        return 0x2500 <= ord(self.text[0]) < 0x25A0 or 0x2800 <= ord(self.text[0]) < 0x2900


Line = tuple[Cell, ...]


@dataclass(frozen=True)
class Frame:
    """What a terminal shows from `time` (seconds) on."""

    time: float
    lines: tuple[Line, ...]


def picture(frames: Sequence[Frame], end: float, background: str, title: str) -> str:
    """Return an SVG that shows the frames in a loop until `end` (seconds). Without animation it shows the first."""
    columns, rows = sum(cell.width for cell in frames[0].lines[0]), len(frames[0].lines)
    width, height = columns * CELL_WIDTH + 2 * PADDING, rows * CELL_HEIGHT + 2 * PADDING
    names: dict[Line, str] = {}
    shown = ["".join(_line_uses(frame, names)) for frame in frames]
    definitions = "".join(f'<g id="{name}">{"".join(_draw_line(line))}</g>' for line, name in names.items())
    strip = "".join(f'<g transform="translate({_n(number * width)})">{uses}</g>' for number, uses in enumerate(shown))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"<style>{_font_face(frames)}text{{font:{_n(FONT_SIZE)}px {FONT_FAMILY};white-space:pre}}"
        f"{_animation(frames, end, width)}</style>"
        f'<defs>{definitions}</defs><rect width="{_n(width)}" height="{_n(height)}" rx="10" fill="{background}"/>'
        f'<svg width="{_n(width)}" height="{_n(height)}"><g transform="translate({_n(PADDING)} {_n(PADDING)})">'
        f'<g class="strip">{strip}</g></g></svg></svg>\n'
    )


def _animation(frames: Sequence[Frame], end: float, width: float) -> str:
    if len(frames) == 1:
        return ""
    start = frames[0].time
    length = end - start
    steps = "".join(
        f"{_n(100 * (frame.time - start) / length, 3)}%{{transform:translateX({_n(-number * width)}px)}}"
        for number, frame in enumerate(frames)
    )
    return (
        f"@keyframes play{{{steps}to{{transform:translateX({_n(-(len(frames) - 1) * width)}px)}}}}"
        f".strip{{animation:play {_n(length)}s step-end infinite}}"
        "@media(prefers-reduced-motion:reduce){.strip{animation:none}}"
    )


def _line_uses(frame: Frame, names: dict[Line, str]) -> Iterator[str]:
    for row, line in enumerate(frame.lines):
        if any(cell.text != " " or cell.background != "" for cell in line):
            name = names.setdefault(line, f"l{len(names)}")
            yield f'<use href="#{name}"' + (f' y="{_n(row * CELL_HEIGHT)}"/>' if row else "/>")


def _draw_line(line: Line) -> Iterator[str]:
    column = 0
    for background, group in groupby(line, key=lambda cell: cell.background):
        columns = sum(cell.width for cell in group)
        if background:
            x, width = _n(column * CELL_WIDTH), _n(columns * CELL_WIDTH)
            yield f'<rect x="{x}" width="{width}" height="{_n(CELL_HEIGHT)}" fill="{background}"/>'
        column += columns
    column = 0
    for _, group in groupby(line, key=lambda cell: cell.style):
        cells = list(group)
        columns = sum(cell.width for cell in cells)
        text = "".join(cell.text for cell in cells)
        if text.strip():
            yield _draw_text(text, column, columns, cells[0])
        column += columns


def _draw_text(text: str, column: int, columns: int, cell: Cell) -> str:
    # Leading and trailing spaces are skipped, because textLength would stretch them, too.
    left = len(text) - len(text.lstrip())
    columns -= len(text) - len(text.strip())
    style = (
        (' font-weight="bold"' if cell.bold else "")
        + (' font-style="italic"' if cell.italic else "")
        + (' text-decoration="underline"' if cell.underlined else "")
    )
    stretch = f' textLength="{_n(columns * CELL_WIDTH)}" lengthAdjust="spacingAndGlyphs"' if not cell.is_drawn else ""
    x = _n((column + left) * CELL_WIDTH)
    return f'<text x="{x}" y="{_n(BASELINE)}" fill="{cell.foreground}"{style}{stretch}>{escape(text.strip())}</text>'


def _n(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def _font_face(frames: Sequence[Frame]) -> str:
    characters = {
        cell.text for frame in frames for line in frame.lines for cell in line if cell.is_drawn and cell.text in SHAPES
    }
    if not characters:
        return ""
    data = base64.b64encode(cell_font(sorted(characters))).decode()
    return f"@font-face{{font-family:cells;src:url(data:font/woff;base64,{data}) format('woff')}}"


# ---- The font: each character is a list of rectangles (left, bottom, right, top) as shares of the cell ----

Rectangle = tuple[float, float, float, float]
THIN, THICK = 0.11, 0.2  # of the width of the cell
DOT = 0.3  # of the width of the cell


def _shapes() -> dict[str, list[Rectangle]]:
    shapes: dict[str, list[Rectangle]] = {}
    for eighths in range(1, 9):
        shapes[chr(0x2580 + eighths)] = [(0.0, 0.0, 1.0, eighths / 8)]
        shapes[chr(0x2590 - eighths)] = [(0.0, 0.0, eighths / 8, 1.0)]
    shapes |= {"▀": [(0, 0.5, 1, 1)], "▐": [(0.5, 0, 1, 1)], "▔": [(0, 0.875, 1, 1)], "▕": [(0.875, 0, 1, 1)]}
    for characters, thickness in (("─│┌┐└┘├┤┬┴┼╭╮╰╯╴╵╶╷", THIN), ("━┃┏┓┗┛┣┫┳┻╋    ╸╹╺╻", THICK)):
        arms = ("lr", "ud", "rd", "ld", "ru", "lu", "udr", "udl", "lrd", "lru", "lrud", "rd", "ld", "ru", "lu", *"lurd")
        shapes |= {
            character: [_arm(arm, thickness) for arm in directions]
            for character, directions in zip(characters, arms, strict=True)
        }
    shapes.pop(" ")
    # Bit n of a Braille character is dot n + 1 (Unicode 15, section 21.1).
    places = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
    for bits in range(256):
        shapes[chr(0x2800 + bits)] = [_dot(*place) for bit, place in enumerate(places) if bits >> bit & 1]
    return shapes


def _arm(direction: str, thickness: float) -> Rectangle:
    """Return a line from the middle of the cell to its left, upper, right or lower edge."""
    across, along = thickness / 2, thickness / 2 * CELL_WIDTH / CELL_HEIGHT
    return {
        "l": (0.0, 0.5 - along, 0.5 + across, 0.5 + along),
        "r": (0.5 - across, 0.5 - along, 1.0, 0.5 + along),
        "u": (0.5 - across, 0.5 - along, 0.5 + across, 1.0),
        "d": (0.5 - across, 0.0, 0.5 + across, 0.5 + along),
    }[direction]


def _dot(column: int, row: int) -> Rectangle:
    x, y = 0.25 + 0.5 * column, 0.875 - 0.25 * row
    across, along = DOT / 2, DOT / 2 * CELL_WIDTH / CELL_HEIGHT
    return (x - across, y - along, x + across, y + along)


SHAPES = _shapes()


def cell_font(characters: Sequence[str]) -> bytes:
    """Return a WOFF font with these characters of `SHAPES`, each as large as its cell."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    units = 1000
    width, height = round(units * CELL_WIDTH / FONT_SIZE), round(units * CELL_HEIGHT / FONT_SIZE)
    ascent = round(units * BASELINE / FONT_SIZE)
    glyphs = {".notdef": TTGlyphPen(None).glyph()}
    for character in characters:
        pen = TTGlyphPen(None)
        for left, bottom, right, top in SHAPES[character]:
            x0, x1 = round(left * width), round(right * width)
            y0, y1 = round(bottom * height) + ascent - height, round(top * height) + ascent - height
            pen.moveTo((x0, y0))
            for point in ((x0, y1), (x1, y1), (x1, y0)):
                pen.lineTo(point)
            pen.closePath()
        glyphs[f"u{ord(character):04X}"] = pen.glyph()
    builder = FontBuilder(units, isTTF=True)
    builder.setupGlyphOrder(list(glyphs))
    builder.setupCharacterMap({ord(character): f"u{ord(character):04X}" for character in characters})
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(
        {name: (width, glyph.xMin if glyph.numberOfContours else 0) for name, glyph in glyphs.items()}
    )
    builder.setupHorizontalHeader(ascent=ascent, descent=ascent - height)
    builder.setupNameTable({"familyName": "cells", "styleName": "Regular"})
    descent = height - ascent
    builder.setupOS2(sTypoAscender=ascent, sTypoDescender=-descent, usWinAscent=ascent, usWinDescent=descent)
    builder.setupPost()
    builder.font.flavor = "woff"
    with io.BytesIO() as file:
        builder.save(file)
        return file.getvalue()
