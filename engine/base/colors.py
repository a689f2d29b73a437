"""Lines with colors, as programs print them to a terminal: SGR sequences (ECMA-48, 8.3.117) and printable text.

A style is a string of SGR parameters in one canonical form, `1;31;48;5;12`, and "" is the default style. What hides
text or blinks is not part of it. `engine.jobs.command.output_log` writes such lines, `engine.runs.log` reads them for a
terminal and `tui.screens.tables.log_lines` for a screen. Other control characters are escaped, so no line controls a
terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from engine.base.text import printable

MAX_PARAMETERS = 128  # characters of one sequence; 24-bit foreground and background with all attributes take 45
MAX_STYLED_PARTS = 512  # of one line; further text keeps no color
# A line that was cut may end within a sequence.
_SGR = re.compile(rf"\x1b\[([0-9;:]{{0,{MAX_PARAMETERS}}})(?:m|\Z)")
# Bold, dim, italic, underline, reverse, strikethrough, and the codes that end them.
_ATTRIBUTES = (1, 2, 3, 4, 7, 9)
_ENDED_BY = {22: (1, 2), 23: (3,), 24: (4,), 27: (7,), 29: (9,)}
_EXTENDED = {38: 0, 48: 1, 58: 2}  # foreground, background, underline: followed by a color
_NUM_COMPONENTS = {"2": 3, "5": 1}  # 24-bit color, palette of 256


@lru_cache(maxsize=4096)
def change_style(style: str, parameters: str) -> str:
    """Return the style that an SGR sequence with these parameters makes of a style."""
    fields = iter(f"{style};{parameters}".split(";"))
    attributes: set[int] = set()
    colors = ["", "", ""]
    for field in fields:
        code, *details = field.split(":")
        number = int(code or 0)
        if number == 0:
            attributes, colors = set(), ["", "", ""]
        elif number in _EXTENDED:
            colors[_EXTENDED[number]] = _extended_color(number, details, fields)
        elif number in _ATTRIBUTES:
            # `4:0` is the end of an underline, `4:3` a curly one.
            (attributes.discard if details == ["0"] else attributes.add)(number)
        elif number in _ENDED_BY:
            attributes.difference_update(_ENDED_BY[number])
        elif 30 <= number <= 37 or 90 <= number <= 97:
            colors[0] = str(number)
        elif 40 <= number <= 47 or 100 <= number <= 107:
            colors[1] = str(number)
        elif number in (39, 49):
            colors[number == 49] = ""
    return ";".join([*map(str, sorted(attributes)), *filter(None, colors[:2])])


def _extended_color(number: int, details: list[str], fields: Iterator[str]) -> str:
    """Return the canonical parameters of a color: `38;5;N`, `38;2;R;G;B`, with colons also `38:2::R:G:B`; "" if it is
    invalid."""
    kind, *components = details or [next(fields, "")]
    count = _NUM_COMPONENTS.get(kind, 0)
    if details:
        components = components[-count:] if len(components) >= count else []
    else:
        components = [next(fields, "") for _ in range(count)]
    values = [int(component or 0) for component in components if (component or "0").isdigit()]
    if not count or len(values) != count or max(values) > 255:
        return ""
    return ";".join(map(str, (number, kind, *values)))


def colored_parts(line: str) -> list[tuple[str, str]]:
    """Return the parts of a line as text and its style. Control characters except tabs, and other escape sequences than
    SGR, become visible."""
    if "\x1b" not in line:
        return [(_visible(line), "")] if line else []
    text, *rest = _SGR.split(line)
    parts, style = [(text, "")], ""
    for parameters, text in zip(rest[::2], rest[1::2], strict=True):
        style = change_style(style, parameters)
        parts.append((text, style))
    return [(_visible(text), style) for text, style in parts if text]


def _visible(text: str) -> str:
    return "\t".join(map(printable, text.split("\t"))) if "\t" in text else printable(text)


def encode_parts(parts: Iterable[tuple[str, str]]) -> str:
    """Return a line with SGR sequences. Each sequence sets the whole style, and the last one resets it."""
    encoded, current = [], ""
    for index, (text, style) in enumerate(parts):
        if index >= MAX_STYLED_PARTS:
            style = ""
        if style != current:
            encoded.append(f"\x1b[0;{style}m" if style else "\x1b[0m")
            current = style
        encoded.append(text)
    if current:
        encoded.append("\x1b[0m")
    return "".join(encoded)


def with_colors(line: str) -> str:
    """Return a line for a terminal: printable text and SGR sequences."""
    return encode_parts(colored_parts(line))


def without_colors(line: str) -> str:
    """Return a line as printable text."""
    return "".join(text for text, _ in colored_parts(line)) if "\x1b" in line else _visible(line)
